"""Chooses where on the way back each cut of the forward phase lies, and what can be waited for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tflms.checkpointing.crossing import Line
from tflms.checkpointing.gradients import Spine
from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases
from tflms.planning import kernels
from tflms.planning.cost import Sizes

# Operations whose gradient reads their output: its last late reader belongs to their own stage.
_GRADIENT_READS_OUTPUT_NAMES = """
    Relu Relu6 Elu Selu Tanh Sigmoid Softmax LogSoftmax Exp Sqrt Rsqrt Reciprocal Inv MaxPool
    MaxPoolV2 MaxPool3D Max Min Prod SegmentMax SegmentMin Cholesky MatrixInverse
"""
_GRADIENT_READS_OUTPUT = frozenset(_GRADIENT_READS_OUTPUT_NAMES.split())
_SUMS = frozenset(["Add", "AddV2", "AddN"])
_NEVER = 1 << 40

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Reads:
    """Where in the row of gradients the values of the forward phase are read.

    Attributes:
        first, last: per value that gradients read, the places of its first and last reader.
        pinned: values that are read where that does not fit the order of layers; they stay.
        low: per number n, the last place at which something is read that lies behind n.
        high: per number n, the place before the first at which something is read that lies in
            front of n and does not cross. What is cut at n has its turn between the two.
    """

    first: dict[ValueId, int]
    last: dict[ValueId, int]
    pinned: frozenset[ValueId]
    low: tuple[int, ...]
    high: tuple[int, ...]


def late_reads(graph: Graph, line: Line, spine: Spine, weights: Sizes) -> Reads:
    """Find where forward values are read on the way back."""
    first: dict[ValueId, int] = {}
    last: dict[ValueId, int] = {}
    for op_id in line.number:
        for value in graph.op(op_id).outputs:
            places = [
                spine.place[use.op]
                for use in graph.uses(value)
                if use.op in spine.place and not effects.takes_shape(graph.op(use.op).type)
            ]
            if places:
                first[value], last[value] = min(places), max(places)
    values = sorted(first)
    born = np.array([line.number[graph.value(v).op] for v in values], np.int64)
    dead = np.array([line.last.get(v, b) for v, b in zip(values, born.tolist(), strict=True)])
    soon = np.array([first[v] for v in values], np.int64)
    late = np.array([last[v] for v in values], np.int64)
    nbytes = np.array([weights.nbytes[v] for v in values], np.int64)
    free = np.ones(len(values), bool)
    size = len(line.ops) + 2
    high = _below(dead, soon, free, size)
    for at in np.flatnonzero(high[born - 1] < late).tolist():
        against = (dead < born[at]) & (soon <= late[at]) & free
        if nbytes[against].sum() > nbytes[at]:
            free[at] = False
    low = _above(born, late, free, size)
    free &= soon > low[dead]
    low, high = _above(born, late, free, size), _below(dead, soon, free, size)
    pinned = frozenset(v for v, is_free in zip(values, free.tolist(), strict=True) if not is_free)
    return Reads(first, last, pinned, tuple(low.tolist()), tuple((high - 1).tolist()))


def _below(dead: Ints, soon: Ints, free: Bools, size: int) -> Ints:
    """Per number, the first place at which something is read that is dead there."""
    found = np.full(size, _NEVER, np.int64)
    np.minimum.at(found, dead[free], soon[free])
    return np.minimum.accumulate(found)


def _above(born: Ints, late: Ints, free: Bools, size: int) -> Ints:
    """Per number, the last place at which something is read that is made behind it."""
    found = np.full(size, -1, np.int64)
    np.maximum.at(found, born[free] - 1, late[free])
    return np.maximum.accumulate(found[::-1])[::-1]


def find_turns(
    graph: Graph,
    phases: Phases,
    line: Line,
    spine: Spine,
    reads: Reads,
    cuts: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Choose the place on the spine at which the gradient of what crosses each cut is complete.

    Args:
        graph: the graph.
        phases: its phases.
        line: the forward phase.
        spine: the backward phase.
        reads: where the one reads the other.
        cuts: numbers behind which the forward phase may be cut, ascending.

    Returns:
        the cuts that have such a place, and these places.
    """
    chosen: list[int] = []
    turns: list[int] = []
    waitable = [place for place, op in enumerate(spine.ops) if _anchors(graph, phases, spine, op)]
    previous, waited = -1, -1  # the last turn, and what is waited for there
    for position in range(len(cuts) - 1, -1, -1):
        number = cuts[position]
        before = cuts[position - 1] if position else 0
        own = [
            v
            for v in line.across[number] or ()
            if line.number[graph.value(v).op] > before and v not in reads.pinned
        ]
        low = max(previous + 1, reads.low[number], 0)
        high = min(reads.high[number], len(spine.ops) - 1)
        if low > high or not waitable or waitable[0] > high:
            continue
        turn = _place(graph, spine, reads, own, waitable, low, high)
        anchor = waitable[bisect_right(waitable, turn) - 1]
        if anchor > turn or anchor <= waited:  # of two that wait for the same, Grappler makes one
            continue
        chosen.append(number)
        turns.append(turn)
        previous, waited = turn, anchor
    return chosen[::-1], turns[::-1]


def _place(
    graph: Graph,
    spine: Spine,
    reads: Reads,
    own: Sequence[ValueId],
    waitable: Sequence[int],
    low: int,
    high: int,
) -> int:
    """The place within bounds where the gradients of some values are complete: least is alive."""
    least, most, last = low, high, False
    for value in own:
        if value not in reads.last:
            continue
        leading = [
            spine.place[use.op]
            for use in graph.uses(value)
            if spine.holds(use.op) and not effects.takes_shape(graph.op(use.op).type)
        ]
        if graph.producer(value).type in _GRADIENT_READS_OUTPUT and leading:
            most, last = min(most, max(leading) - 1), True
        else:
            least = max(least, reads.last[value])
    if least > most:
        least, most = low, high
    places = range(most, least - 1, -1) if last else range(least, most + 1)
    turn = min(places, key=lambda place: spine.bytes_behind[place])
    at = bisect_left(waitable, turn)  # rather a little later, where something can wait for it
    if at < len(waitable) and waitable[at] <= most:
        turn = waitable[at]
    return turn


def anchor_at(graph: Graph, phases: Phases, spine: Spine, turn: int) -> OpId:
    """Return the last gradient up to a place on the spine that others may wait for."""
    row = reversed(spine.ops[: turn + 1])
    return next(op for op in row if _anchors(graph, phases, spine, op))


def _anchors(graph: Graph, phases: Phases, spine: Spine, op: OpId) -> bool:
    """Tell whether others may wait for an operation, and it is one that leads on."""
    return spine.holds(op) and usable(graph, phases, op)


def usable(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    """Tell whether others may wait for a gradient, itself or a copy: no number may change."""
    op = graph.op(op_id)
    if op.frame or phases.guard[op_id] or not any(phases.activation[v] for v in op.outputs):
        return False
    return signals(graph, op_id) or watched(graph, op_id) is not None


def signals(graph: Graph, op_id: OpId) -> bool:
    """Tell whether others may wait for an operation by a control edge."""
    op = graph.op(op_id)
    if not any(is_real(graph, v) for v in op.outputs):
        return False
    return effects.signals(op.type, _reader_types(graph, op_id)) or _stays_a_sum(graph, op_id)


def _reader_types(graph: Graph, op_id: OpId) -> list[str]:
    """Types of what reads an operation's results, through identities, which Grappler takes out."""
    found: list[str] = []
    stack = [op_id]
    while stack:
        for reader in (use.op for v in graph.op(stack.pop()).outputs for use in graph.uses(v)):
            if graph.op(reader).type == "Identity":
                stack.append(reader)
            else:
                found.append(graph.op(reader).type)
    return found


def _stays_a_sum(graph: Graph, op_id: OpId) -> bool:
    """Tell whether Grappler leaves a sum of gradients as it is, waited for or not.

    It joins sums where the inner one has one reader, and draws a common factor out of products.
    A copy to wait for would do harm here: AddN of three and more adds in an order that depends on
    which of its inputs nobody else holds.
    """
    op = graph.op(op_id)
    if op.type not in _SUMS:
        return False
    if watched(graph, op_id) is None and _SUMS.intersection(_reader_types(graph, op_id)):
        return False
    makers = [graph.producer(v) for v in op.inputs]
    inner = (m for m in makers if m.type in _SUMS)
    if any(len(kernels.live_readers(graph, m.outputs[0])) < 2 for m in inner):
        return False
    return not all(m.type == "Mul" for m in makers)


def watched(graph: Graph, op_id: OpId) -> ValueId | None:
    """Return the result of an operation of which a copy may be taken, for others to wait for.

    Not of one in a row of products that Grappler regroups: a copy is one more reader.
    """
    if kernels.in_uneven_row(graph, op_id):
        return None
    for value in graph.op(op_id).outputs:
        readers = {op.id for op in kernels.live_readers(graph, value) if not op.role}
        if len(readers) > 1 and is_real(graph, value) and not _is_summed(graph, value):
            return value
    return None


def _is_summed(graph: Graph, value: ValueId) -> bool:
    """Tell whether a value goes into a sum of three or more, through views or not.

    AddN begins with an input that nobody else holds: one more that holds it changes the order.
    """
    stack = [value]
    while stack:
        for use in graph.uses(stack.pop()):
            op = graph.op(use.op)
            if op.type == "AddN" and len(op.inputs) > 2:
                return True
            if effects.of(op.type).view and not op.role:
                stack += op.outputs
    return False


def is_real(graph: Graph, value: ValueId) -> bool:
    """Tell whether a value is a tensor of real numbers, and no scalar."""
    v = graph.value(value)
    return v.dtype in ("f32", "f16", "bf16", "f64") and v.shape != ()
