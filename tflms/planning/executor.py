"""Knows in which orders TensorFlow's executor may run a step that nothing else orders.

It runs whatever is ready. One thread alone takes what became ready first; what is handed to a pool
of threads, the newest comes first (``executor.cc``, ``ScheduleReady``), and which of several that
became ready together is the newest depends on how the optimised graph lists them. With several
threads, what little waits for, the gradients of weights, may fall behind what much waits for.
"""

from __future__ import annotations

import heapq
from collections import deque

from tflms.graph.ir import Graph, OpId


def executor_order(graph: Graph, within: set[OpId]) -> list[OpId]:
    """Return operations in the order in which a first-in first-out executor makes them ready."""
    waiting, first = _waiting(graph, within)
    ready = deque(first)
    order: list[OpId] = []
    while ready:
        order.append(ready.popleft())
        ready += _made_ready(graph, waiting, order[-1])
    return order


def possible_orders(graph: Graph, within: set[OpId]) -> tuple[list[OpId], ...]:
    """Return orders between which what an executor with any number of threads does should lie.

    First in, first out; the newest first, once as listed and once the other way round; and what
    most operations wait for one after another first, so that the gradients of weights come last.
    """
    first = executor_order(graph, within)
    return (
        first,
        _newest_first(graph, within, reverse=False),
        _newest_first(graph, within, reverse=True),
        _longest_first(graph, within, first),
    )


def _newest_first(graph: Graph, within: set[OpId], *, reverse: bool) -> list[OpId]:
    waiting, ready = _waiting(graph, within)
    ready.reverse()
    order: list[OpId] = []
    while ready:
        order.append(ready.pop())
        made = _made_ready(graph, waiting, order[-1])
        ready += reversed(made) if reverse else made
    return order


def _longest_first(graph: Graph, within: set[OpId], order: list[OpId]) -> list[OpId]:
    """What has most operations behind it, one after another, comes first; as in ``order`` else."""
    behind: dict[OpId, int] = {}
    for op in reversed(order):
        behind[op] = 1 + max((behind.get(after, 0) for after in graph.successors(op)), default=0)
    key = {op: (-behind[op], place) for place, op in enumerate(order)}
    waiting, first = _waiting(graph, within)
    ready = [(key[op], op) for op in first]
    heapq.heapify(ready)
    found: list[OpId] = []
    while ready:
        found.append(heapq.heappop(ready)[1])
        for op in _made_ready(graph, waiting, found[-1]):
            heapq.heappush(ready, (key[op], op))
    return found


def _waiting(graph: Graph, within: set[OpId]) -> tuple[dict[OpId, int], list[OpId]]:
    """How many operations each one waits for, and those that wait for none."""
    waiting = {
        op.id: sum(before in within for before in graph.predecessors(op.id))
        for op in graph.ops()
        if op.id in within
    }
    return waiting, [op for op, count in waiting.items() if not count]


def _made_ready(graph: Graph, waiting: dict[OpId, int], ran: OpId) -> list[OpId]:
    """What waits for nothing any more once an operation has run."""
    made: list[OpId] = []
    for after in graph.successors(ran):
        if after in waiting:
            waiting[after] -= 1
            if not waiting[after]:
                made.append(after)
    return made
