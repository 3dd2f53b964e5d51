"""Chooses which values leave the device, when they must be gone, and when each comes back.

Size, lifetime and link decide. A value's uses in the planned order have gaps between them; a gap
in which it is away frees its bytes for so long. Gaps are taken greedily where memory is over the
limit, by the overload that they cover per byte moved; those that turned out needless are given
back. Then copies are placed: an operation that needs the room waits for the copy out (so the limit
holds whatever the link does), and each copy back starts as late as the link allows and memory
permits. After the greedy part of POFO (Beaumont et al. 2021, section 4), on graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tflms.graph.ir import OpId, Use, ValueId
from tflms.planning.cost import Costs

Ints = npt.NDArray[np.int64]
_ROUNDS = 12  # of choosing and placing, each with a target lowered by what the last was over
_SLOW_COPIES_PERCENT = 103  # of the peak with instant copies: what slow ones may make of it
_SLOW_LINK = 1.25  # copies back start early enough for a link that is so much slower
_LEAD = 12  # anchors before its use: sooner, a copy back only breaks the room into pieces
_LATE_COPY = 1.25  # a copy out may take so much longer than planned before it is waited for


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of the planned order in which nothing uses a value.

    Attributes:
        value: the value.
        nbytes: its size on the device.
        after: place of the last use (or the making) before the gap.
        until: place of the first use behind it.
        uses: the uses behind the gap, up to the next one.
    """

    value: ValueId
    nbytes: int
    after: int
    until: int
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """One return of a value: the uses that it serves and the operation that starts the copy."""

    uses: tuple[Use, ...]
    anchor: OpId


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that is parked: its returns, and the operation that waits until it is gone."""

    value: ValueId
    nbytes: int
    ins: tuple[SwapIn, ...]
    gate: OpId | None


@dataclass(frozen=True, slots=True)
class Problem:
    """What the planner decides about.

    Attributes:
        order: the planned order of the step.
        resident: bytes on the device at each place, with nothing swapped.
        start: seconds at which each place starts, without waiting.
        seconds: how long each place runs.
        anchors: whether the operation at a place may start a copy back.
        gates: whether it may wait for a copy out.
        gaps: per value its gaps, in order.
        costs: rates of the link.
        limit: bytes that the device may hold.
        host_limit: bytes that may be parked at one time, or None.
        away: per value, places at which it must not be on the device, whatever the sum is: its
            buffer would be in the way of another.
        pins: values too small to be worth a copy, which only leave where they are in the way.
        swept: of these, those that leave in any case, for where small buffers come to lie depends
            on what is not predicted.
        relaxed: values whose copies may take their time. What comes next waits for those of all
            others, so that nothing depends on how long they take.
    """

    order: tuple[OpId, ...]
    resident: Ints
    start: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    anchors: npt.NDArray[np.bool_]
    gates: npt.NDArray[np.bool_]
    gaps: Mapping[ValueId, tuple[Gap, ...]]
    costs: Costs
    limit: int
    host_limit: int | None = None
    away: Mapping[ValueId, tuple[int, ...]] = field(default_factory=dict)
    pins: frozenset[ValueId] = frozenset()
    swept: frozenset[ValueId] = frozenset()
    relaxed: frozenset[ValueId] = frozenset()

    def may_be_away(self, value: ValueId, place: int) -> Gap | None:
        """Return the gap in which a value can be gone at a place, or None.

        Between its ends there are an operation that can wait for the copy out, up to the place,
        and one behind it that can start the copy back.
        """
        for gap in self.gaps.get(value, ()):
            if gap.after < place < gap.until:
                gate = self.gates[gap.after + 1 : place + 1].any()
                return gap if gate and self.anchors[place : gap.until].any() else None
        return None


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, and the peak that the planner expects.

    Attributes:
        choices: the values that are parked.
        peak_bytes: what the device holds at most.
        feasible: whether all limits are met.
        exhausted: nothing is left that could be parked.
        stays: per gap that is used, its value and the first and last place at which it is away.
        roomiest: the values that are parked, by the room that is left while they are copied, most
            first.
    """

    choices: tuple[Choice, ...]
    peak_bytes: int
    feasible: bool
    exhausted: bool = False
    stays: tuple[tuple[ValueId, int, int], ...] = ()
    roomiest: tuple[ValueId, ...] = ()


@dataclass(slots=True)
class _Window:
    """A gap that is taken, and where it was placed: the value is away from ``gone`` to ``back``.

    ``late`` and ``early`` are the same for copies that take their time.
    """

    gap: Gap
    gone: int
    back: int = -1
    late: int = -1
    early: int = -1


def decide(problem: Problem) -> Decision:
    """Choose and place swaps so that the device never holds more than the limit.

    Deterministic. If nothing fits, the decision with the lowest peak is returned, not feasible.
    """
    target = problem.limit
    best: Decision | None = None
    for _ in range(_ROUNDS):
        taken, complete = _choose(problem, target)
        decision = dataclasses.replace(_place(problem, taken), exhausted=not complete)
        if best is None or _better(decision, best):
            best = decision
        if decision.feasible or complete is False:
            break
        over = decision.peak_bytes - problem.limit
        target -= max(over, problem.limit // 200)
    assert best is not None
    return best


def _better(new: Decision, old: Decision) -> bool:
    if new.feasible != old.feasible:
        return new.feasible
    return new.peak_bytes < old.peak_bytes


def _choose(problem: Problem, target: int) -> tuple[list[Gap], bool]:
    """Take gaps until the target holds; False where all that help were taken and it does not."""
    gaps = [
        gap
        for value in problem.gaps
        if value not in problem.pins or value in problem.away or value in problem.swept
        for gap in problem.gaps[value]
    ]
    resident = problem.resident.astype(np.int64).copy()
    kept = {(g.value, g.until) for g in gaps if g.value in problem.swept or _away_in(problem, g)}
    if not gaps or (int(resident.max(initial=0)) <= target and not kept):
        return [], bool(int(resident.max(initial=0)) <= target)
    after = np.array([g.after for g in gaps])
    until = np.array([g.until for g in gaps])
    nbytes = np.array([g.nbytes for g in gaps], np.int64)
    away = problem.start[until] - (problem.start[after] + problem.seconds[after])
    moving = nbytes / problem.costs.to_host + nbytes / problem.costs.to_device
    hidden = np.minimum(1.0, (away + 1e-9) / (moving + 1e-9))
    free = np.ones(len(gaps), bool)
    chosen = [i for i, g in enumerate(gaps) if (g.value, g.until) in kept]
    for pick in chosen:
        free[pick] = False
        resident[after[pick] + 1 : until[pick]] -= nbytes[pick]
    fits = True
    while True:
        worst = int(np.argmax(resident))
        if resident[worst] <= target:
            break
        covers = free & (after < worst) & (worst < until)
        candidates = np.flatnonzero(covers)
        if not len(candidates):
            fits = False
            break
        excess = np.maximum(resident - target, 0)
        summed = np.concatenate(([0], np.cumsum(excess)))
        places = np.concatenate(([0], np.cumsum(excess > 0)))
        lo, hi = after[candidates] + 1, until[candidates]
        size = nbytes[candidates]
        covered = np.minimum(summed[hi] - summed[lo], (places[hi] - places[lo]) * size)
        score = covered / size * hidden[candidates]
        pick = int(candidates[int(np.argmax(score))])
        free[pick] = False
        chosen.append(pick)
        resident[after[pick] + 1 : until[pick]] -= nbytes[pick]
    for pick in sorted(chosen, key=lambda i: (int(nbytes[i]), i)):  # give back what is needless
        stretch = slice(int(after[pick]) + 1, int(until[pick]))
        if (gaps[pick].value, gaps[pick].until) in kept:
            continue
        if fits and int(resident[stretch].max(initial=0)) + nbytes[pick] <= target:
            resident[stretch] += nbytes[pick]
            chosen.remove(pick)
    return [gaps[i] for i in chosen], fits


def _away_in(problem: Problem, gap: Gap) -> list[int]:
    """Places in a gap at which its value must be gone."""
    return [p for p in problem.away.get(gap.value, ()) if gap.after < p < gap.until]


def _place(problem: Problem, taken: Sequence[Gap]) -> Decision:
    """Set gates and anchors; values are away only between them."""
    places = np.flatnonzero(problem.anchors)
    windows = [_Window(gap, gap.after + 1) for gap in taken]
    gates = np.flatnonzero(problem.gates)
    windows = [w for w in windows if _next(gates, w.gap.after) < w.gap.until]
    resident = problem.resident.astype(np.int64).copy()
    _place_outs(problem, gates, windows, resident)
    _place_ins(problem, places, windows, resident)
    by_value: dict[ValueId, list[_Window]] = {}
    for window in windows:
        if window.gone <= window.back:
            by_value.setdefault(window.gap.value, []).append(window)
    choices = tuple(_choice(problem, by_value[v]) for v in sorted(by_value))
    peak = int(resident.max(initial=0))
    stays = tuple((w.gap.value, w.gone, w.back) for w in windows if w.gone <= w.back)
    fits = peak <= problem.limit and _host_fits(problem, windows)
    return Decision(choices, peak, fits, stays=stays, roomiest=_roomiest(windows, resident))


def _roomiest(windows: Sequence[_Window], resident: Ints) -> tuple[ValueId, ...]:
    held: dict[ValueId, int] = {}
    for window in windows:
        copying = (
            resident[window.gone : window.late + 1],
            resident[max(window.early, window.gone) : window.back + 1],
        )
        most = max(int(places.max(initial=0)) for places in copying) + window.gap.nbytes
        held[window.gap.value] = max(held.get(window.gap.value, 0), most)
    return tuple(sorted(held, key=lambda value: (held[value], value)))


def _next(places: Ints, after: int) -> int:
    """The first place behind another at which an operation can wait."""
    at = int(np.searchsorted(places, after, side="right"))
    return int(places[at]) if at < len(places) else 1 << 60


def _place_outs(problem: Problem, places: Ints, windows: list[_Window], resident: Ints) -> None:
    """Find the operation that waits for each copy out.

    No sooner than the copy is done anyway, unless the room is needed sooner. ``resident`` becomes
    what is held with values away from there to their next use.
    """
    starts = problem.start[places]
    engine = 0.0
    first: dict[ValueId, _Window] = {}
    for window in sorted(windows, key=lambda w: (w.gap.after, w.gap.value)):
        first.setdefault(window.gap.value, window)
    pending: list[tuple[int, _Window]] = []
    for window in first.values():
        made = window.gap.after
        begin = max(engine, float(problem.start[made] + problem.seconds[made]))
        copying = window.gap.nbytes / problem.costs.to_host
        engine = begin + copying
        at = int(np.searchsorted(starts, begin + copying * _LATE_COPY, side="left"))
        relaxed = int(places[at]) if at < len(places) else 1 << 60
        soonest = _next(places, made)
        window.late = max(soonest, min(relaxed, window.gap.until - 1))
        window.gone = window.late if window.gap.value in problem.relaxed else soonest
        if asked := _away_in(problem, window.gap):
            latest = int(places[int(np.searchsorted(places, min(asked), side="right")) - 1])
            window.gone = max(soonest, min(window.gone, latest))
        pending.append((soonest, window))
    for window in windows:
        if first[window.gap.value] is not window:
            window.gone = window.gap.after + 1  # its copy is on the host since the first gap
        resident[window.gone : window.gap.until] -= window.gap.nbytes
    # Where that is too late, operations wait for the copies that were made first: for the limit,
    # and for a peak that hardly depends on how fast copies are.
    at_best = resident.copy()
    for soonest, window in pending:
        at_best[soonest : window.gone] -= window.gap.nbytes
    most = min(problem.limit, int(at_best.max(initial=0)) * _SLOW_COPIES_PERCENT // 100)
    late = sorted(pending, key=lambda item: (item[0], item[1].gap.value))
    for soonest, window in late:
        stretch = resident[soonest : window.gone]
        over = np.flatnonzero(stretch > most)
        if len(over):
            at = soonest + int(over[0])
            gate = int(places[int(np.searchsorted(places, at, side="right")) - 1])
            gate = max(gate, soonest)
            resident[gate : window.gone] -= window.gap.nbytes
            window.gone = gate


def _place_ins(problem: Problem, places: Ints, windows: list[_Window], resident: Ints) -> None:
    """Let each copy back start as late as the link allows, and no sooner than there is room.

    Where room is short, it goes to what is needed first.
    """
    ends = problem.start[places] + problem.seconds[places]
    engine = float("inf")
    due: dict[tuple[ValueId, int], float] = {}
    for window in sorted(windows, key=lambda w: (-w.gap.until, w.gap.value)):
        copying = window.gap.nbytes / problem.costs.to_device * _SLOW_LINK
        engine = min(engine, float(problem.start[window.gap.until])) - copying
        due[window.gap.value, window.gap.until] = engine
    for window in sorted(windows, key=lambda w: (w.gap.until, w.gap.value)):
        gap = window.gap
        use = gap.until
        last = int(np.searchsorted(places, use, side="left")) - 1
        wanted = int(np.searchsorted(ends[: last + 1], due[gap.value, use], side="right")) - 1
        window.early = int(places[max(wanted, 0)])
        wanted = max(wanted, last - (_LEAD if gap.value in problem.relaxed else 0))
        low = max(int(np.searchsorted(places, max(window.gone, gap.after + 1), side="left")), 0)
        if low > last:
            window.back = window.gone - 1  # no operation lies between: it stays
            resident[window.gone : use] += gap.nbytes
            continue
        if asked := _away_in(problem, gap):
            low = max(low, int(np.searchsorted(places, max(asked), side="left")))
        earliest = int(places[min(max(wanted, low), last)])
        stretch = resident[earliest + 1 : use] + gap.nbytes
        over = np.flatnonzero(stretch > problem.limit)
        if len(over):
            earliest += 1 + int(over[-1])
            at = int(np.searchsorted(places, earliest, side="left"))
            earliest = int(places[min(at, last)])
        window.back = earliest
        resident[earliest + 1 : use] += gap.nbytes


def _choice(problem: Problem, windows: list[_Window]) -> Choice:
    windows.sort(key=lambda w: w.gap.until)
    first = windows[0].gap
    served: list[SwapIn] = []
    taken = {w.gap.until: w for w in windows}
    for gap in problem.gaps[first.value]:
        if gap.until < first.until:
            continue
        if gap.until in taken:
            served.append(SwapIn(gap.uses, problem.order[taken[gap.until].back]))
        else:  # a gap that was not taken: the copy that is back already serves it
            served[-1] = dataclasses.replace(served[-1], uses=served[-1].uses + gap.uses)
    gate = problem.order[windows[0].gone]
    return Choice(first.value, first.nbytes, tuple(served), gate)


def _host_fits(problem: Problem, windows: Sequence[_Window]) -> bool:
    if problem.host_limit is None:
        return True
    held = np.zeros(len(problem.order) + 1, np.int64)
    spans: dict[ValueId, tuple[int, int, int]] = {}
    for window in windows:
        low, high, _ = spans.get(window.gap.value, (window.gap.after, 0, 0))
        spans[window.gap.value] = (
            min(low, window.gap.after), max(high, window.gap.until), window.gap.nbytes,
        )  # fmt: skip
    for low, high, nbytes in spans.values():
        held[low : high + 1] += nbytes
    return int(held.max(initial=0)) <= problem.host_limit
