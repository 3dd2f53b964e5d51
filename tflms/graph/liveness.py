"""Which operations of a step somebody reads: TensorFlow drops pure ones that are only waited for.

``tf.gradients`` ties the gradients of an operation together by control edges, those of constants
too (the exponent of a square, say), which nothing reads. Grappler takes such operations away and
lets others wait for what they read. A copy made for one of them would be waited for in the middle
of products that Grappler otherwise regroups.
"""

from __future__ import annotations

from tflms.graph import effects
from tflms.graph.ir import Graph
from tflms.graph.order import Phases


def read(graph: Graph, phases: Phases) -> list[bool]:
    """Tell per operation whether it has an effect, ends the step, or is read by one that does."""
    known = len(phases.step)  # what was inserted is there because somebody reads it
    found = [False] * known + [True] * (graph.size - known)
    for op_id in reversed(phases.order):
        if not phases.step[op_id]:
            continue
        op = graph.op(op_id)
        uses = [use.op for v in op.outputs for use in graph.uses(v)]
        readers = [r for r in uses if r >= known or phases.step[r]]
        waiting = [w for w in graph.control_users(op_id) if w >= known or phases.step[w]]
        ends = not readers and not waiting
        effect = op.stateful or not effects.of(op.type).pure
        found[op_id] = effect or ends or any(found[reader] for reader in readers)
    return found
