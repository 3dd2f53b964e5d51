"""Decides in which order a step's operations run, so that little is alive at a time.

A list schedule over the whole step: what lets go of more than it makes runs at once (a weight's
gradient and its update, which end an activation, before the gradient for the layer before);
otherwise the user's own order is kept, which runs branch after branch. Greedy, O(E log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import as_made
from tflms.planning import kernels
from tflms.planning.cost import Sizes

_SMALL_NBYTES = 16 * 1024


class _Alive:
    """Readers that are still to come, per buffer; views share the buffer of what they show."""

    def __init__(
        self,
        graph: Graph,
        weights: Sizes,
        parked: Collection[ValueId] = (),
        late: Collection[OpId] = (),
    ) -> None:
        self.graph, self.weights = graph, weights
        self.parked, self.late = parked, late
        self.home: dict[ValueId, ValueId] = {}
        self.nbytes: dict[ValueId, int] = {}
        self.readers: dict[ValueId, dict[OpId, None]] = {}

    def learn(self, order: list[OpId]) -> None:
        graph, weights = self.graph, self.weights
        folded = kernels.folded(graph, order)
        for op_id in order:
            op = graph.op(op_id)
            facts = effects.of(op.type)
            for value in op.outputs:
                if facts.view and op.inputs:
                    self.home[value] = self.home.get(op.inputs[0], op.inputs[0])
                    continue
                free = not weights.on_device[op_id] or op_id in folded or bool(facts.reads)
                self.home[value] = value
                self.nbytes[value] = 0 if free else weights.nbytes[value]
                self.readers[value] = {}
            if op_id not in folded:
                for value in op.inputs:
                    home = self.home.get(value)
                    if home is not None and not (home in self.parked and op_id in self.late):
                        self.readers[home][op_id] = None

    def change(self, op_id: OpId) -> int:
        """Bytes that are alive after the operation more than before, if it ran next."""
        op = self.graph.op(op_id)
        made = sum(self.nbytes.get(v, 0) for v in op.outputs if self.home.get(v) == v)
        homes = dict.fromkeys(self.home[v] for v in op.inputs if v in self.home)
        gone = sum(
            self.nbytes[h] for h in homes if len(self.readers[h]) == 1 and op_id in self.readers[h]
        )
        return made - gone

    def fetched(self, op_id: OpId) -> int:
        """Bytes of what has to come back from the host for an operation, and then is gone again."""
        if op_id not in self.late:
            return 0
        homes = dict.fromkeys(self.home[v] for v in self.graph.op(op_id).inputs if v in self.home)
        return sum(self.nbytes[home] for home in homes if home in self.parked)

    def run(self, op_id: OpId) -> list[OpId]:
        """Mark an operation as run; return the readers that became the last of their buffer."""
        last: list[OpId] = []
        for home in dict.fromkeys(
            self.home[v] for v in self.graph.op(op_id).inputs if v in self.home
        ):
            readers = self.readers[home]
            if readers.pop(op_id, op_id) is None and len(readers) == 1 and self.nbytes[home]:
                last.append(next(iter(readers)))
        return last


def list_schedule(
    graph: Graph,
    weights: Sizes,
    within: set[OpId],
    *,
    parked: Collection[ValueId] = (),
    late: Collection[OpId] = (),
    lightest: bool = False,
) -> list[OpId]:
    """Return a topological order of a step's operations that keeps little alive.

    Args:
        graph: the user's graph.
        weights: its sizes and placement.
        within: the operations of the step.
        parked: values that are on the host when no operation uses them.
        late: operations that read these from the host.
        lightest: of what makes more than it lets go of, the operation that needs least memory
            goes first, instead of the one that the program made first.
    """
    waiting = {op: sum(p in within for p in graph.predecessors(op)) for op in sorted(within)}
    natural = as_made(graph, within)
    rank = {op: place for place, op in enumerate(natural)}
    alive = _Alive(graph, weights, parked, late)
    alive.learn(natural)
    ready: dict[OpId, int] = {}
    heap: list[tuple[int, int, OpId]] = []

    def push(op: OpId) -> None:
        change = alive.change(op)
        key = _urgency(change)
        if lightest and key >= 0:
            key = max(change, 0) + alive.fetched(op)
        ready[op] = key
        heapq.heappush(heap, (key, rank[op], op))

    for op, count in waiting.items():
        if not count:
            push(op)
    order: list[OpId] = []
    while heap:
        key, _, op = heapq.heappop(heap)
        if ready.get(op) != key:
            continue  # it ran, or its worth has changed since
        del ready[op]
        order.append(op)
        for reader in alive.run(op):
            if reader in ready:
                push(reader)
        for after in graph.successors(op):
            if after in waiting:
                waiting[after] -= 1
                if not waiting[after]:
                    push(after)
    return order


def _urgency(change: int) -> int:
    """What frees memory goes first, most first; then what hardly matters; then the rest, as made.

    Small operations must not wait for their turn: an update needs its learning rate.
    """
    if abs(change) <= _SMALL_NBYTES:
        return 0
    return change if change < 0 else 1


def least_peak(
    graph: Graph,
    weights: Sizes,
    order: Sequence[OpId],
    parked: Collection[ValueId],
) -> int:
    """Return the bytes that an order needs at once, if parked values are gone between their uses.

    Variables and workspaces are left out; no result takes over the buffer of an input.
    """
    alive = _Alive(graph, weights)
    alive.learn(list(order))
    place = {op: at for at, op in enumerate(order)}
    change = [0] * (len(order) + 1)
    for home, readers in alive.readers.items():
        nbytes = alive.nbytes[home]
        if not nbytes:
            continue
        uses = sorted({place[graph.value(home).op], *(place[op] for op in readers)})
        if home not in parked:
            uses = [uses[0], uses[-1]]
            change[uses[0]] += nbytes
            change[uses[1] + 1] -= nbytes
            continue
        for use in uses:
            change[use] += nbytes
            change[use + 1] -= nbytes
    peak = held = 0
    for step in change:
        held += step
        peak = max(peak, held)
    return peak
