"""Knows in which orders TensorFlow's executor may run a step that nothing else orders.

It runs whatever is ready. One thread alone takes what became ready first; what is handed to a pool
of threads, the newest comes first (``executor.cc``, ``ScheduleReady``), and which of several that
became ready together is the newest depends on how the optimised graph lists them. With several
threads, what little waits for, the gradients of weights, may fall behind what much waits for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator

from tflms.graph.ir import Graph, OpId


def executor_order(graph: Graph, within: set[OpId]) -> list[OpId]:
    """Return operations in the order in which a first-in first-out executor makes them ready."""
    return _first_first(_Step(graph, within))


def possible_orders(graph: Graph, within: set[OpId]) -> list[list[OpId]]:
    """Return orders between which what an executor with any number of threads does should lie.

    First in, first out; the newest first, once as listed and once the other way round; and what
    most operations wait for one after another first, so that the gradients of weights come last.
    """
    step = _Step(graph, within)
    first = _first_first(step)
    return [first, *_newest_first(step), _longest_first(step, first)]


def orders_left(graph: Graph, within: set[OpId]) -> Iterator[list[OpId]]:
    """Yield orders between which a rewritten step should lie, the order of which is fixed by edges.

    First in, first out, and the newest first. The same once more with copies between device and
    host so slow that all runs which need not wait for them; and what most operations wait for
    first, which can go on only until it has to wait for a copy: then the rest catches up.
    """
    step = _Step(graph, within)
    first = _first_first(step)
    yield first
    yield from _newest_first(step)
    copies = {op for op in first if graph.op(op).role in ("swap_out", "swap_in")}
    if copies:
        yield _taken(step, lambda _, count: (count, 0), slow=copies)
        yield from _newest_first(step, slow=copies)
        yield _longest_first(step, first, slow=copies)


class _Step:
    """Operations that run, and which of these wait for each of them."""

    def __init__(self, graph: Graph, within: set[OpId]) -> None:
        self.after = {
            op.id: [after for after in graph.successors(op.id) if after in within]
            for op in graph.ops()
            if op.id in within
        }
        self.counts = dict.fromkeys(self.after, 0)
        for after in self.after.values():
            for op in after:
                self.counts[op] += 1

    def waiting(self) -> tuple[dict[OpId, int], list[OpId]]:
        """How many operations each one waits for, and those that wait for none."""
        return dict(self.counts), [op for op, count in self.counts.items() if not count]

    def made_ready(self, waiting: dict[OpId, int], ran: OpId) -> list[OpId]:
        """What waits for nothing any more once an operation has run."""
        made: list[OpId] = []
        for after in self.after[ran]:
            waiting[after] -= 1
            if not waiting[after]:
                made.append(after)
        return made


def _first_first(step: _Step) -> list[OpId]:
    waiting, order = step.waiting()
    for op in order:  # which grows
        order += step.made_ready(waiting, op)
    return order


def _newest_first(step: _Step, slow: Collection[OpId] = ()) -> Iterator[list[OpId]]:
    for reverse in (False, True):
        yield _taken(step, lambda _, count: (-count, 0), newest=True, reverse=reverse, slow=slow)


def _longest_first(step: _Step, order: list[OpId], slow: Collection[OpId] = ()) -> list[OpId]:
    """What has most operations behind it, one after another, comes first; as in ``order`` else."""
    behind: dict[OpId, int] = {}
    for op in reversed(order):
        behind[op] = 1 + max((behind[after] for after in step.after[op]), default=0)
    key = {op: (-behind[op], place) for place, op in enumerate(order)}
    return _taken(step, lambda op, _: key[op], slow=slow)


def _taken(
    step: _Step,
    key: Callable[[OpId, int], tuple[int, int]],
    *,
    newest: bool = False,
    reverse: bool = False,
    slow: Collection[OpId] = (),
) -> list[OpId]:
    """Operations in the order in which they are taken from those that are ready, least key first.

    Args:
        step: the operations.
        key: of an operation, and of how many became ready before it.
        newest: the first that are ready are listed as if the last of them had come first.
        reverse: what becomes ready together is listed the other way round.
        slow: operations that are done when nothing else is ready.
    """
    waiting, made = step.waiting()
    if newest:
        made.reverse()
    ready: list[tuple[tuple[int, int], OpId]] = []
    later: deque[OpId] = deque()
    order: list[OpId] = []
    count = 0
    while True:
        for op in made:
            count += 1
            if op in slow:
                later.append(op)
            else:
                heapq.heappush(ready, (key(op, count), op))
        if not ready and not later:
            return order
        order.append(heapq.heappop(ready)[1] if ready else later.popleft())
        made = step.made_ready(waiting, order[-1])
        if reverse:
            made.reverse()
