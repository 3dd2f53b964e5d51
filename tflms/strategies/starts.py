"""Gives each variable that a constant starts a buffer of its own, outside of the step.

A variable shares the buffer of the constant that it is assigned. Its first update then copies it
into whatever hole there is, amid the first step, and there it stays: zeros that Adam's slots start
with end up scattered between the activations, and large ones find no room in the next step.
"""

from __future__ import annotations

from tflms.graph.ir import OpId, Use
from tflms.planning import kernels
from tflms.rewriting.engine import Application, Applied, Engine


def run(engine: Engine, step: set[OpId]) -> int:
    """Propose ``own_buffer`` for constants that variables are started with; return how many."""
    graph = engine.graph
    outside = [op for op in engine.phases.order if op not in step]
    constant = kernels.folded(graph, outside)
    count = 0
    for op_id in outside:
        op = graph.op(op_id)
        if op.type != "AssignVariableOp" or graph.value(op.inputs[1]).op not in constant:
            continue
        bindings = {"c": op.inputs[1], "starts": (Use(op_id, 1),)}
        count += isinstance(engine.apply(Application("own_buffer", bindings)), Applied)
    return count
