"""Lets gradients of weights wait until those before them have been used, and are gone.

The update that reads such a gradient is ready when others are, and threads may take it late: one
thread alone takes all updates at the end of the step. Then many gradients are in memory. A schedule
counts on one.
"""

from __future__ import annotations

from collections import deque

from tflms.checkpointing.gradients import Spine
from tflms.checkpointing.turns import signals
from tflms.graph.ir import Graph, OpId
from tflms.planning.cost import Sizes
from tflms.rewriting.engine import Application, Engine

_MOST_ENDS = 4  # what is read more widely, as by a norm of all gradients, stays for long anyway
_SMALL = 4096  # bytes: biases, scales


def few_at_a_time(engine: Engine, spine: Spine, weights: Sizes, most_bytes: int) -> int:
    """Order gradients of weights behind the updates of earlier ones; return how many wait.

    Args:
        engine: for the graph.
        spine: of its backward phase.
        weights: bytes of its values.
        most_bytes: so much of them may be in memory; of those that are larger, one.
    """
    graph = engine.graph
    pending: deque[tuple[int, list[OpId]]] = deque()
    held = count = 0
    behind: set[OpId] = set()  # gradients of weights and what is made of them
    for op in sorted(spine.gradients, key=engine.place):
        if any(graph.value(v).op in behind for v in graph.op(op).inputs):
            behind.add(op)
            continue
        nbytes = _nbytes(graph, spine, weights, op)
        if nbytes < _SMALL:
            continue
        behind.add(op)
        if not signals(graph, op):
            continue
        waits = False
        while pending and held + nbytes > most_bytes:
            gone, ends = pending.popleft()
            held -= gone
            for end in ends:
                if engine.place(end) < engine.place(op):
                    engine.apply(Application("order", {"a": end, "b": op}))
                    waits = True
        pending.append((nbytes, _ends(graph, op)))
        held += nbytes
        count += waits
    return count


def _nbytes(graph: Graph, spine: Spine, weights: Sizes, op: OpId) -> int:
    """Bytes of a gradient that is used, and by no other layer; 0 of what is none."""
    if spine.holds(op) or not weights.on_device[op]:
        return 0
    read = [v for v in graph.op(op).outputs if graph.value(v).is_tensor and graph.uses(v)]
    return max((weights.nbytes[v] for v in read), default=0)


def _ends(graph: Graph, op: OpId) -> list[OpId]:
    """What the use of a result ends in, such as the update of a variable; nothing if in much."""
    found: dict[OpId, None] = {}
    seen, stack = {op}, [op]
    while stack:
        here = stack.pop()
        readers = {use.op for v in graph.op(here).outputs for use in graph.uses(v)}
        if not readers and here != op:
            found[here] = None
        for reader in sorted(readers - seen):
            seen.add(reader)
            stack.append(reader)
    return list(found) if len(found) <= _MOST_ENDS else []
