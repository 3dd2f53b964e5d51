"""Frees activations that are held only so that a late operation can ask for their shape.

``with tf.control_dependencies(update_ops): optimizer.minimize(loss)`` puts control edges on the
shape operations of the gradients too; each of them then keeps its activation until the last
update has run.
"""

from __future__ import annotations

from tflms.graph import effects
from tflms.graph.ir import Graph
from tflms.graph.order import Phases
from tflms.rewriting.engine import Application, Applied, Engine


def run(engine: Engine) -> int:
    """Propose ``early_shape`` for shape operations that wait for more than their input."""
    graph, phases = engine.graph, engine.phases
    count = 0
    for op_id in phases.order:
        op = graph.op(op_id)
        if not op.controls or not phases.step[op_id] or phases.forward[op_id]:
            continue
        if not effects.takes_shape(op.type) or not _waits(graph, phases, op_id):
            continue
        readers = tuple(use for value in op.outputs for use in graph.uses(value))
        if readers:
            outcome = engine.apply(Application("early_shape", {"s": op_id, "readers": readers}))
            count += isinstance(outcome, Applied)
    return count


def _waits(graph: Graph, phases: Phases, op_id: int) -> bool:
    op = graph.op(op_id)
    made = max(phases.level[graph.value(v).op] for v in op.inputs)
    return phases.level[op_id] > made + 1
