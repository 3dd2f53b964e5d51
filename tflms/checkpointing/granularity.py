"""Chooses behind which operations the forward phase is cut, and what that asks to be kept.

First at articulation points: where one value crosses that the backward phase reads again, a cut
costs nothing. Where a stage between two such cuts is heavy, as the whole of a network with long
skips is, it is cut where several values cross. What crosses two cuts or more is kept, from the
first time that it is made to its last use: the skips. So a U-Net becomes a chain of blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tflms.checkpointing.crossing import Line, root
from tflms.checkpointing.turns import Reads, is_real
from tflms.graph import effects
from tflms.graph.ir import Graph, ValueId
from tflms.graph.order import Phases
from tflms.planning.cost import Sizes

_PATIENCE = 32  # cuts that may bring nothing before the search for better ones ends
_WORTH_PERCENT = 90  # a finer chain is one that needs at most so much of what a coarse one needs


def articulations(
    graph: Graph, phases: Phases, line: Line, reads: Reads, *, base: int = 0
) -> list[int]:
    """Return the numbers behind which one value crosses that the backward phase reads again."""
    found: list[int] = []
    before: set[ValueId] = set()
    for number in range(base + 1, len(line.ops)):
        values = line.across[number]
        here = set(values or ()) - reads.pinned
        if values is None or len(here) != 1 or here == before:
            continue
        (value,) = here
        again = value in reads.last or any(
            use.op in line.number and not phases.forward[use.op] for use in graph.uses(value)
        )
        if again and _is_own(graph, value):
            found.append(number)
            before = here
    return found


def finer(
    graph: Graph,
    phases: Phases,
    line: Line,
    reads: Reads,
    weights: Sizes,
    coarse: Sequence[int],
    *,
    base: int = 0,
    most: int,
) -> list[int] | None:
    """Cut heavy stages once more, where several values cross; None where that saves nothing.

    The heaviest stage is halved again and again, each time where least has to be kept for it. What
    counts is what is kept and the heaviest stage: that much the step holds, however much is
    computed again.

    Args:
        graph: the graph.
        phases: its phases.
        line: the forward phase.
        reads: where the backward phase reads it.
        weights: bytes of the graph's values.
        coarse: the cuts to begin with, ascending.
        base: nothing up to this number is cut.
        most: no more cuts than so many.
    """
    return _Splitter(graph, phases, line, reads, weights, coarse, base).run(most)


class _Splitter:
    def __init__(
        self,
        graph: Graph,
        phases: Phases,
        line: Line,
        reads: Reads,
        weights: Sizes,
        coarse: Sequence[int],
        base: int,
    ) -> None:
        self.graph, self.phases, self.line, self.reads = graph, phases, line, reads
        self.weights = weights
        self.bounds = [base, *coarse, len(line.ops)]
        self.kept: set[ValueId] = set()
        self.kept_bytes = 0
        self.homes = {root(graph, v) for v in reads.last if v not in reads.pinned}
        self.saved = self._saved()
        self.pieces = [sum(self.saved[a + 1 : b + 1]) for a, b in pairwise(self.bounds)]
        self.total = max(1, sum(self.pieces))
        self.whole: set[tuple[int, int]] = set()  # between these bounds, no cut is possible
        self.may_cross: dict[ValueId, bool] = {}

    def run(self, most: int) -> list[int] | None:
        start = best = self._needed()
        cuts, idle = self.bounds[1:-1], 0
        while len(self.bounds) - 2 < most and idle < _PATIENCE:
            heaviest = max(
                (i for i, ends in enumerate(pairwise(self.bounds)) if ends not in self.whole),
                key=lambda i: self.pieces[i],
                default=None,
            )
            if heaviest is None:
                break
            a, b = self.bounds[heaviest], self.bounds[heaviest + 1]
            where = self._split(a, b)
            if where is None:
                self.whole.add((a, b))
                continue
            self._take(where, a, b)
            idle += 1
            needed = self._needed()
            if needed < best:
                best, cuts, idle = needed, self.bounds[1:-1], 0
        return cuts if best * 100 < start * _WORTH_PERCENT else None

    def _needed(self) -> float:
        """What the step holds: what is kept, the heaviest stage, and what stages weigh on average.

        The average is one over bytes: where a heavy stage is halved, more schedules can be quick.
        """
        return self.kept_bytes + max(self.pieces) + sum(w * w for w in self.pieces) / self.total

    def _saved(self) -> list[int]:
        """Per number, the bytes of what it makes that the backward phase reads."""
        graph, line = self.graph, self.line
        found = [0] * (len(line.ops) + 1)
        for home in self.homes:
            op = graph.value(home).op
            if op in line.number:
                found[line.number[op]] += self.weights.nbytes[home]
        return found

    def _split(self, a: int, b: int) -> int | None:
        """The best number between two cuts to cut behind."""
        total = sum(self.saved[a + 1 : b + 1])
        best: tuple[int, int] | None = None
        left = 0
        for number in range(a + 1, b):
            left += self.saved[number]
            values = self._crossing(number)
            if not values or left in (0, total) or not all(map(self._may_cross, values)):
                continue
            cost = max(left, total - left)
            cost += self._bytes(values) + self._bytes(self._carried(values, a, b))
            if best is None or cost < best[0]:
                best = cost, number
        return None if best is None else best[1]

    def _take(self, number: int, a: int, b: int) -> None:
        for value in self._carried(self._crossing(number) or [], a, b):
            self.kept.add(value)
            self.kept_bytes += self.weights.nbytes[value]
            home = root(self.graph, value)
            at = self.line.number.get(self.graph.value(home).op)
            if at is not None and home in self.homes:
                gone = min(self.saved[at], self.weights.nbytes[home])
                self.saved[at] -= gone
                self.pieces[self._piece_of(at)] -= gone
        where = self._piece_of(number)
        left = sum(self.saved[a + 1 : number + 1])
        self.pieces[where : where + 1] = [left, self.pieces[where] - left]
        self.bounds.insert(where + 1, number)

    def _piece_of(self, number: int) -> int:
        return min(max(bisect_left(self.bounds, number) - 1, 0), len(self.pieces) - 1)

    def _crossing(self, number: int) -> list[ValueId] | None:
        values = self.line.across[number]
        if values is None:
            return None
        return [v for v in values if v not in self.kept and v not in self.reads.pinned]

    def _carried(self, values: Iterable[ValueId], a: int, b: int) -> list[ValueId]:
        """Those of some values that must be kept, as they cross the cuts on either side as well."""
        across = self.line.across
        beside = {*(across[a] or ()), *(across[b] or ())}
        return [v for v in values if v in beside or not _is_own(self.graph, v)]

    def _may_cross(self, value: ValueId) -> bool:
        """Tell whether somebody more may read a value: TensorFlow fuses it with nothing."""
        if value not in self.may_cross:
            graph, op = self.graph, self.graph.producer(value)
            readers = {use.op for use in graph.uses(value)}
            types = [graph.op(reader).type for reader in readers]
            self.may_cross[value] = (
                (len(readers) > 1 or effects.signals(op.type, types))
                and not (op.frame or self.phases.guard[op.id])
                and not effects.vanishes(op.type, types)
            )
        return self.may_cross[value]

    def _bytes(self, values: Iterable[ValueId]) -> int:
        return sum(self.weights.nbytes[v] for v in values)


def _is_own(graph: Graph, value: ValueId) -> bool:
    """Tell whether a value is a tensor of real numbers with a buffer of its own."""
    op = graph.producer(value)
    readers = (graph.op(use.op).type for use in graph.uses(value))
    if effects.of(op.type).view or effects.vanishes(op.type, readers):
        return False  # a view keeps what it shows; what a kernel takes in may never exist
    return is_real(graph, value)
