"""Knows which gradients of biases TensorFlow's CPU pass merges with those of a kernel.

oneDNN's kernel makes both at once from the gradient that both read. The pass that puts it in their
place looks for cycles only a few operations far: where the kernel's gradient has to wait for what
waits for the bias', the two would wait for each other in the merged graph, and the executor would
end the step without what is behind them, and say nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tflms.errors import GraphError
from tflms.graph.ir import Graph, OpId
from tflms.graph.order import topological
from tflms.planning.cost import device_kind

_TIES = ("Identity", "NoOp")  # by which the program has an operation wait for others
_GRADIENT_SLOT = 2  # of Conv2DBackpropFilter: what both read


def merged(
    graph: Graph, ops: Iterable[OpId], default_kind: str
) -> list[tuple[OpId, OpId, tuple[OpId, ...]]]:
    """Return gradients of a kernel and of a bias that the runtime may make in one, and who follows.

    In a planned order the first has to come before those that follow: the second, or what comes
    after it where the program has the first wait for the second. Nothing may be added that waits
    for the second, or that it waits for. Then no roundabout way leads from one to the other.

    Args:
        graph: the graph.
        ops: operations to look at.
        default_kind: the kind of device that runs operations which name none.
    """
    found: list[tuple[OpId, OpId, tuple[OpId, ...]]] = []
    for op_id in ops:
        op = graph.op(op_id)
        kind = device_kind(op.device, default_kind)
        if op.type != "Conv2DBackpropFilter" or kind != "CPU":
            continue
        read = source = op.inputs[_GRADIENT_SLOT]
        while True:
            for use in graph.uses(source):
                if graph.op(use.op).type == "BiasAddGrad":
                    behind = (use.op,) if read == source else _readers(graph, use.op)
                    found.append((op_id, use.op, behind))
            if graph.producer(source).type != "Identity":
                break
            source = graph.producer(source).inputs[0]
    return found


def _readers(graph: Graph, op_id: OpId) -> tuple[OpId, ...]:
    """What comes next after an operation, seen through ties; no gradient of a kernel."""
    found: list[OpId] = []
    for after in graph.successors(op_id):
        kind = graph.op(after).type
        if kind in _TIES:
            found += _readers(graph, after)
        elif kind != "Conv2DBackpropFilter":
            found.append(after)
    return tuple(dict.fromkeys(found))


def check(graph: Graph, default_kind: str) -> None:
    """Check that nothing inserted leads from one half of a pair to the other.

    The net below all strategies: where it fails, a step would end early and say nothing.

    Args:
        graph: as it was rewritten.
        default_kind: the kind of device that runs operations which name none.

    Raises:
        GraphError: a roundabout way leads from one to the other.
    """
    pairs = merged(graph, (op.id for op in graph.ops() if op.id < graph.original_ops), default_kind)
    if not pairs:
        return
    place = {op: at for at, op in enumerate(topological(graph))}
    added = {(e.op, e.other) for e in graph.journal if e.kind == "control"}
    for weight, bias, _ in pairs:
        first, last = sorted((weight, bias), key=lambda op: place[op])
        if _by_a_new_way(graph, first, last, place, added):
            raise GraphError(
                f"{graph.op(first).name!r} and {graph.op(last).name!r} may become one kernel, but "
                "this rewrite would have the second wait for what waits for the first; use "
                "strategy 'auto', which plans for it, or another device than the CPU"
            )


def _by_a_new_way(
    graph: Graph,
    first: OpId,
    last: OpId,
    place: Mapping[OpId, int],
    added: Collection[tuple[OpId, OpId | None]],
) -> bool:
    """Tell whether the last operation needs the first one by way of something inserted."""
    stack, seen = [(first, False)], {(first, False)}
    while stack:
        here, new = stack.pop()
        for after in graph.successors(here):
            if place[after] > place[last]:
                continue
            then = (after, new or bool(graph.op(after).role) or (after, here) in added)
            if then == (last, True):
                return True
            if then not in seen:
                seen.add(then)
                stack.append(then)
    return False
