"""Puts the operations that carry gradients into a row, from the loss down to the first layers."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tflms.errors import GraphError
from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases
from tflms.planning.cost import Sizes


@dataclass(frozen=True, slots=True)
class Spine:
    """What reads the forward phase on the way back, or leads to what does, in a row.

    What reads late layers comes before what reads earlier ones, as far as edges allow: so a
    backward phase of several branches, of several losses or with long skips is one sequence too.
    Among operations of one layer, those that end there (gradients of weights) come first.

    Attributes:
        ops: these operations, in order; every edge between two of them agrees with it.
        place: per gradient operation, the last place in the row that it comes after, or its own.
        gradients: all operations that compute with gradients.
        leading: those of the row that others of the row read from.
        last: per tensor that the row makes and reads, the place of its last reader.
        bytes_behind: per place, the bytes of such tensors that are read behind it.
        lowest: the first number of the forward phase that a gradient reads.
    """

    ops: tuple[OpId, ...]
    place: Mapping[OpId, int]
    gradients: frozenset[OpId]
    leading: frozenset[OpId]
    last: Mapping[ValueId, int]
    bytes_behind: tuple[int, ...]
    lowest: int

    def holds(self, op: OpId) -> bool:
        """Tell whether others in the row read what an operation of it makes."""
        return op in self.leading

    def before(self, op: OpId) -> int | None:
        """Return the last place in the row that an operation comes after; -1 for none.

        None for what is no gradient, and for gradients that come after nothing in the row.
        """
        place = self.place.get(op)
        if place is None:
            return None
        return place - 1 if self.ops[place] == op else place


def find_spine(graph: Graph, phases: Phases, number: Mapping[OpId, int], weights: Sizes) -> Spine:
    """Find the row of the backward phase.

    What reads a value of the forward phase and comes after a reader of a later one goes back: it
    carries gradients, and so does all that comes after it, and what leads to it from the loss.
    So the operations that carry them are told from those that do not, such as moving averages,
    metrics, or derivatives that depend on forward values alone.

    Args:
        graph: the graph.
        phases: its phases.
        number: per forward operation, how far along it is.
        weights: bytes of the graph's values.

    Raises:
        GraphError: nothing behind the forward phase goes back.
    """
    late = [o for o in phases.order if phases.step[o] and not phases.forward[o]]
    reads = {op: found for op in late if (found := _reads(graph, op, number))}
    gradients = _carriers(graph, late, reads)
    behind: dict[OpId, list[OpId]] = {}
    depth: dict[OpId, int] = {}  # how far along the latest layer is that is read here or behind
    for op in reversed(gradients):
        after = [s for s in graph.successors(op) if s in depth]
        own = max(reads.get(op, ()), default=-1)
        if after or own >= 0 or _reads_data(graph, phases, op):
            depth[op] = own if own >= 0 else max((depth[s] for s in after), default=0)
            behind[op] = after
    leading = _leading(graph, depth)
    row = _ordered(depth, behind, leading)
    at = {op: place for place, op in enumerate(row)}
    place: dict[OpId, int] = {}
    for op in gradients:
        here = at.get(op)
        if here is None:
            here = max((place[p] for p in graph.predecessors(op) if p in place), default=None)
        if here is not None:
            place[op] = here
    last = {
        value: max(readers)
        for op in row
        for value in graph.op(op).outputs
        if graph.value(value).is_tensor
        and (readers := [at[use.op] for use in graph.uses(value) if use.op in at])
    }
    change = [0] * (len(row) + 1)
    for value, end in last.items():
        change[at[graph.value(value).op]] += weights.nbytes[value]
        change[end] -= weights.nbytes[value]
    return Spine(
        ops=tuple(row),
        place=place,
        gradients=frozenset(gradients),
        leading=frozenset(leading),
        last=last,
        bytes_behind=tuple(accumulate(change[:-1])),
        lowest=min(min(reads[op]) for op in gradients if op in reads),
    )


def _reads(graph: Graph, op_id: OpId, number: Mapping[OpId, int]) -> list[int]:
    """Numbers of the forward operations whose values an operation reads."""
    op = graph.op(op_id)
    if effects.takes_shape(op.type):
        return []
    return [number[source] for v in op.inputs if (source := graph.value(v).op) in number]


def _reads_data(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    """Tell whether an operation reads data, a mask or the like of the forward phase."""
    inputs = graph.op(op_id).inputs
    return any(phases.activation[v] and phases.forward[graph.value(v).op] for v in inputs)


def _carriers(
    graph: Graph, late: Sequence[OpId], reads: Mapping[OpId, Sequence[int]]
) -> list[OpId]:
    """The operations that carry gradients, in order."""
    newest: dict[OpId, int] = {}
    back: set[OpId] = set()  # what goes back, and what comes after it
    span, top = 0, -1
    for op in late:
        before = [p for p in graph.predecessors(op) if p in newest]
        known = max((newest[p] for p in before), default=-1)
        newest[op] = max(known, *reads[op]) if op in reads else known
        if op in reads and known > min(reads[op]):
            back.add(op)
            if known - min(reads[op]) > span:
                span, top = known - min(reads[op]), known
        elif any(p in back for p in before):
            back.add(op)
    if not back:
        raise GraphError(
            "no operation behind the loss reads an early activation after a late one: there are no "
            "gradients to recompute for. Pass the tensor that the gradients were taken of as "
            "loss=, and the train op among fetches="
        )
    leads = set(back)
    for op in reversed(late):
        if op not in leads and newest[op] >= top and any(s in leads for s in graph.successors(op)):
            leads.add(op)
    return [op for op in late if op in leads]


def _leading(graph: Graph, row: Iterable[OpId]) -> set[OpId]:
    """What others in the row read from; control edges, which tie gradients, do not count."""
    within = set(row)
    return {
        op
        for op in within
        if any(use.op in within for value in graph.op(op).outputs for use in graph.uses(value))
    }


def _ordered(
    depth: Mapping[OpId, int],
    behind: Mapping[OpId, Iterable[OpId]],
    leading: Collection[OpId],
) -> list[OpId]:
    """A topological order in which what reads late layers comes first."""
    waiting = dict.fromkeys(depth, 0)
    for after in behind.values():
        for op in after:
            waiting[op] += 1
    heap = [(-depth[op], op in leading, op) for op, count in waiting.items() if not count]
    heapq.heapify(heap)
    row: list[OpId] = []
    while heap:
        op = heapq.heappop(heap)[2]
        row.append(op)
        for after_op in behind[op]:
            waiting[after_op] -= 1
            if not waiting[after_op]:
                heapq.heappush(heap, (-depth[after_op], after_op in leading, after_op))
    return row
