"""Lets a large gradient of weights wait until the one before it has been used, and is gone.

The update that reads such a gradient is ready when others are, and threads may take it late; then
two gradients are in memory, or more. A schedule counts on one.
"""

from __future__ import annotations

from itertools import pairwise

from tflms.checkpointing.gradients import Spine
from tflms.graph.ir import Graph, OpId
from tflms.planning.cost import Sizes
from tflms.rewriting.engine import Application, Engine

_MOST_ENDS = 4  # what is read more widely, as by a norm of all gradients, stays for long anyway


def one_at_a_time(engine: Engine, spine: Spine, weights: Sizes, least_bytes: int) -> int:
    """Order gradients of weights behind the updates before them; return how many wait.

    Args:
        engine: for the graph.
        spine: of its backward phase.
        weights: bytes of its values.
        least_bytes: smaller gradients are left alone.
    """
    graph = engine.graph
    large: list[OpId] = []
    behind: set[OpId] = set()  # these and what is made of them
    for op in sorted(spine.gradients, key=engine.place):
        if any(graph.value(v).op in behind for v in graph.op(op).inputs):
            behind.add(op)
        elif _is_large(graph, spine, weights, op, least_bytes):
            large.append(op)
            behind.add(op)
    count = 0
    for before, after in pairwise(large):
        for end in _ends(graph, before):
            if engine.place(end) < engine.place(after):
                engine.apply(Application("order", {"a": end, "b": after}))
                count += 1
    return count


def _is_large(graph: Graph, spine: Spine, weights: Sizes, op: OpId, least_bytes: int) -> bool:
    """Tell whether an operation makes a large gradient that is used, and by no other layer."""
    if spine.holds(op) or not weights.on_device[op]:
        return False
    read = [v for v in graph.op(op).outputs if graph.value(v).is_tensor and graph.uses(v)]
    return any(weights.nbytes[v] >= least_bytes for v in read)


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
