"""Knows which gradients of biases TensorFlow's CPU pass merges with those of a kernel.

oneDNN's kernel makes both at once from the gradient that both read. The pass that puts it in their
place looks for cycles only a few operations far: where the kernel's gradient has to wait for what
waits for the bias', the two would wait for each other in the merged graph, and the executor would
end the step without what is behind them, and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from tflms.graph.ir import Graph, OpId
from tflms.planning.cost import short_device

_GRADIENT_SLOT = 2  # of Conv2DBackpropFilter: what both read


def merged(graph: Graph, ops: Iterable[OpId], default_kind: str) -> list[tuple[OpId, OpId]]:
    """Return pairs of a kernel's and a bias' gradient that the runtime may make in one kernel.

    In a planned order the first has to come before the second, and nothing may be added that the
    second waits for: then they can be merged, whatever waits for either of them.

    Args:
        graph: the graph.
        ops: operations to look at.
        default_kind: the kind of device that runs operations which name none.
    """
    found: list[tuple[OpId, OpId]] = []
    for op_id in ops:
        op = graph.op(op_id)
        kind = short_device(op.device).partition(":")[0] or default_kind
        if op.type != "BiasAddGrad" or kind != "CPU":
            continue
        for use in graph.uses(op.inputs[0]):
            other = graph.op(use.op)
            if other.type == "Conv2DBackpropFilter" and use.slot == _GRADIENT_SLOT:
                found.append((other.id, op_id))
    return found
