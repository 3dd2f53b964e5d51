"""Looks for swaps that keep a limit: decides, applies, predicts, and undoes what does not fit.

Strictly first: what comes next waits for each copy, so that buffers come and go in one order only,
which can be predicted to the byte; limits close to the floor are met, at the price of time in which
the device waits. Then copies may take their time, those first that have most room, as long as all
fits however long they take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tflms.graph.erase import original
from tflms.graph.ir import OpId, Use, ValueId
from tflms.planning import auto
from tflms.planning.allocator import Overflow, overflow, rounded
from tflms.planning.auto import Choice, Decision, Gap, Problem, SwapIn
from tflms.planning.cost import Costs, Sizes, with_inserted
from tflms.planning.simulate import Events, Replay, Timeline
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies.gaps import Views, gaps_of
from tflms.strategies.holes import (
    ROOM_PER_MILLE,
    TIGHT_ROOM_PER_MILLE,
    TIGHT_VARIANTS,
    VARIANTS,
    in_the_way,
    least_limit,
)
from tflms.strategies.lines import Chain, chain, deferred, fix_order
from tflms.strategies.swap import Swapped
from tflms.strategies.waiting import hold

_ATTEMPTS = 60  # for a graph that is small; fewer for larger ones, so that planning takes seconds
_FEWEST_ATTEMPTS = 10
_SMALL_GRAPH = 3000
_ATTEMPTS_RELAXED = 6
_RELAXATIONS = 5
_AIMS_PERCENT = (100, 92, 85, 70)  # of the limit: where little is parked, little can be moved about
_LOOKED_BACK = 20  # operations of the planned line
_NO_STALL = 0.01  # of the step's time: less is not worth looking for better
_TIGHT = 1.3  # times the floor: limits below leave no room for chance
_SIGNIFICANT = 20_000  # an operation counts that touches this part of the peak, or more


@dataclass(frozen=True, slots=True)
class Found:
    """A rewrite that keeps the limit, by prediction.

    Attributes:
        swapped: the values that were parked.
        timeline: the step as it will run.
        order_edges: control edges that fix the order.
    """

    swapped: list[Swapped]
    timeline: Timeline
    order_edges: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A decision that keeps the limit, what it was asked for, and the step that it makes."""

    setup: Problem
    decision: Decision
    timeline: Timeline


@dataclass(slots=True)
class Search:
    """What stays the same from attempt to attempt.

    Attributes:
        engine: of the graph in its planned order.
        weights, costs: of the graph before anything is parked.
        step: operations that run.
        order: these, as planned.
        replay: of the graph before anything is parked.
        wanted: values that may be parked. pins: those that are too small to be worth it.
        limit: bytes that the device may hold. floor: what no plan can go below.
        host_limit: bytes that may be parked at one time, or None.
        waste: what the device's allocator leaves over at most, see ``overflow``.
        default_kind: the kind of device that runs operations which name none.
        tried: peak, replay and order of each attempt that failed.
    """

    engine: Engine
    weights: Sizes
    costs: Costs
    step: set[OpId]
    order: list[OpId]
    replay: Replay
    wanted: set[ValueId]
    pins: frozenset[ValueId]
    limit: int
    floor: int
    host_limit: int | None
    waste: int
    default_kind: str
    tried: list[tuple[int, Replay, list[OpId]]] = dataclasses.field(default_factory=list)

    def run(self) -> Found | None:
        """Rewrite the graph so that it keeps the limit; leave it as it was where nothing does."""
        graph = self.engine.graph
        start = len(graph.journal)
        links = chain(
            graph, self.engine.phases, self.weights, self.order, self._least(),
            default_kind=self.default_kind,
        )  # fmt: skip
        edges = fix_order(self.engine, links)
        self.weights = with_inserted(graph, self.weights)  # the edges keep some from being fused
        kept = self._aim(problem(self, links), links, self._attempts())
        if kept is None:
            graph.rollback(start)
            return None
        best = kept if self.tight else self._relax(kept, links)
        swapped = apply(self.engine, links, best.decision, best.setup.relaxed)
        timeline, _ = self._judge(links)  # the same, of the operations that stay
        return Found(swapped, timeline, edges)

    @property
    def tight(self) -> bool:
        """Whether the limit is so close to the floor that no copy may take its time."""
        return self.limit < _TIGHT * self.floor

    def least_limit(self) -> int:
        """The smallest limit that one of the plans that were tried would keep."""
        loose = least_limit(self.tried, self.waste, VARIANTS, ROOM_PER_MILLE)
        if not self.tight:
            return loose
        tight = least_limit(self.tried, self.waste, TIGHT_VARIANTS, TIGHT_ROOM_PER_MILLE)
        return min(tight, max(loose, int(_TIGHT * self.floor)))

    def _room_per_mille(self) -> int:
        return TIGHT_ROOM_PER_MILLE if self.tight else ROOM_PER_MILLE

    def _variants(self) -> Sequence[tuple[int, bool]]:
        return TIGHT_VARIANTS if self.tight else VARIANTS

    def _aim(self, setup: Problem, links: Chain, attempts: int) -> _Kept | None:
        """Aim at the limit, then lower and lower."""
        for percent in _AIMS_PERCENT:
            aim = dataclasses.replace(setup, limit=setup.limit * percent // 100)
            if (kept := self._keep(aim, links, attempts)) is not None:
                return kept
        return None

    def _keep(self, setup: Problem, links: Chain, attempts: int) -> _Kept | None:
        """Look for a decision that keeps the limit; the graph is left as it is."""
        graph = self.engine.graph
        mark = len(graph.journal)
        for _ in range(attempts):
            decision = auto.decide(setup)
            done = apply(self.engine, links, decision, setup.relaxed)
            timeline, spill = self._judge(links)
            more = None
            if spill is not None:
                more = in_the_way(graph, setup, decision, *spill)
            graph.rollback(mark)
            if timeline.peak_bytes <= self.limit and spill is None:
                return _Kept(setup, decision, timeline)
            stay = {one.value for one in decision.choices} - {one.value for one in done}
            if spill is not None:
                stay &= set(setup.away)
            if stay:  # they were asked to go, and a rule refuses them: others have to
                setup = _without(setup, stay)
            elif more is not None:
                setup = dataclasses.replace(setup, away=more)
            elif decision.exhausted:
                break
            else:
                down = max((timeline.peak_bytes - self.limit) // 2, self.limit // 100)
                setup = dataclasses.replace(setup, limit=setup.limit - down)
        return None

    def _relax(self, strict: _Kept, links: Chain) -> _Kept:
        """Let as many copies take their time as the limit allows, those with most room first."""
        best, values = strict, strict.decision.roomiest
        low, high, count = 0, len(values) + 1, len(values)
        for number in range(_RELAXATIONS):
            stalls = best.timeline.stall_seconds
            if not low < count < high or stalls < _NO_STALL * best.timeline.seconds:
                break
            relaxed = frozenset(values[:count] if number else strict.setup.gaps)
            away = {v: at for v, at in strict.setup.away.items() if v not in relaxed}
            setup = dataclasses.replace(strict.setup, relaxed=relaxed, away=away)
            if number:
                kept = self._keep(setup, links, _ATTEMPTS_RELAXED)
            else:
                kept = self._aim(setup, links, self._attempts() // len(_AIMS_PERCENT))
            if kept is None:
                high = count
            else:
                low = count
                if kept.timeline.seconds < best.timeline.seconds:
                    best = kept
            count = (low + high) // 2
        return best

    def _attempts(self) -> int:
        return max(_FEWEST_ATTEMPTS, _ATTEMPTS * _SMALL_GRAPH // max(len(self.order), _SMALL_GRAPH))

    def _least(self) -> int:
        """Bytes that an operation has to touch to have its place in the order."""
        graph = self.engine.graph
        sized = [self.weights.nbytes[v] for v in self.wanted if graph.value(v).op in self.step]
        peak = self.replay.run(self.order).peak_bytes
        return max(1, min(peak // _SIGNIFICANT, max(sized, default=1) // 4))

    def _judge(self, links: Chain) -> tuple[Timeline, tuple[Events, Overflow, list[OpId]] | None]:
        """Predict the rewritten step, and what finds no room in it."""
        graph = self.engine.graph
        inserted = self.step | {op.id for op in graph.ops() if op.joins_step}
        weights = with_inserted(graph, self.weights)
        replay = Replay(graph, weights, inserted, self.costs, like=self.replay)
        planned = [o for o in self.engine.witness if o in inserted]
        timeline = replay.run(planned)
        apart = deferred(graph, links, planned)
        if apart is not None:  # the executor may leave what the updates do not need for later
            timeline = max(timeline, replay.run(apart), key=lambda t: t.peak_bytes)
        spill = None
        variants = self._variants()
        for pace, scattered in variants if timeline.peak_bytes <= self.limit else ():
            ran = apart if apart is not None and pace == variants[-1][0] else planned
            asked = replay.events(ran, pace)
            room = self.limit * self._room_per_mille() // 1000
            found = overflow(
                asked.persistent, asked.events, room, waste=self.waste, scattered=scattered
            )
            if found is not None:
                spill = (asked, found, ran)
                break
        if spill is not None or timeline.peak_bytes > self.limit:
            self.tried.append((timeline.peak_bytes, replay, planned))
        return timeline, spill


def _without(setup: Problem, values: Collection[ValueId]) -> Problem:
    """The problem with values that stay on the device."""
    gaps = {v: gaps for v, gaps in setup.gaps.items() if v not in values}
    away = {v: at for v, at in setup.away.items() if v not in values}
    return dataclasses.replace(setup, gaps=gaps, away=away)


def problem(search: Search, links: Chain) -> Problem:
    """Set up what the planner decides about, from the timeline of the ordered graph."""
    graph, costs = search.engine.graph, search.costs
    timeline = search.replay.run(search.order)
    order = timeline.order
    place = {op: i for i, op in enumerate(order)}
    per_op = np.zeros(graph.size)
    per_op[: len(costs.seconds)] = costs.seconds
    seconds = per_op[np.asarray(order, np.int64)]
    in_chain = np.zeros(len(order), bool)
    in_chain[[place[op] for op in links.ops]] = True
    gates = in_chain.copy()
    gates[[place[op] for op in links.heads]] = True
    views = Views(graph, order)
    gaps: dict[ValueId, tuple[Gap, ...]] = {}
    for op_id in order:
        for value in graph.op(op_id).outputs:
            if value in search.wanted or value in search.pins:
                held = max(place[op_id], views.last_use_of_others(value, place))
                nbytes = rounded(search.weights.nbytes[value])
                if found := gaps_of(graph, nbytes, place, gates, value, held):
                    gaps[value] = found
    return Problem(
        order, np.asarray(timeline.resident, np.int64), np.cumsum(seconds) - seconds, seconds,
        in_chain, gates, gaps, costs, search.limit, search.host_limit, pins=search.pins,
        swept=search.pins if search.tight else frozenset(),
    )  # fmt: skip


def apply(
    engine: Engine, links: Chain, decision: Decision, relaxed: Collection[ValueId]
) -> list[Swapped]:
    """Apply what was decided through the rules; what a rule refuses stays on the device.

    What comes next in the planned order waits for each copy back, except for relaxed values.
    """
    graph = engine.graph
    place = {op: at for at, op in enumerate(engine.witness)}
    # What is made last first: its copy out then comes before copies back that start at that place.
    choices = sorted(decision.choices, key=lambda one: -place[graph.value(one.value).op])
    line = {after: before for before, after in pairwise(links.ops)}
    done: list[Swapped] = []
    for choice in choices:
        swapped = _apply_choice(engine, links, line, choice)
        if swapped is not None:
            done.append(swapped)
    _wait_for_returns(engine, links, [one for one in done if one.value not in relaxed])
    return done


def _wait_for_returns(engine: Engine, links: Chain, swapped: Sequence[Swapped]) -> None:
    """Let what is next wait for copies back, and these for copies out that are under way.

    Those that start at one place run one by one.
    """
    graph = engine.graph
    following = dict(pairwise(links.ops))
    lines: dict[OpId, list[OpId]] = {}
    leaving: dict[OpId, list[OpId]] = {}
    for one in swapped:
        for gate in graph.control_users(one.swap_out):
            leaving.setdefault(gate, []).append(one.swap_out)
        for swap_in, _ in one.groups:
            lines.setdefault(next(iter(graph.op(swap_in).controls)), []).append(swap_in)
    for anchor in sorted(lines):
        after = following.get(anchor)
        first = lines[anchor][0]
        pairs = list(pairwise([*lines[anchor], *([] if after is None else [after])]))
        if after is not None:
            pairs += [(out, first) for out in leaving.get(after, ())]
        for before, op in pairs:
            source = original(graph, graph.op(before).outputs[0])
            if graph.op(op).role or links.may_wait(op, graph.value(source).op):
                engine.apply(Application("order", {"a": before, "b": op}))


def _reaching(engine: Engine, line: Mapping[OpId, OpId], swap_in: SwapIn) -> OpId:
    """The operation that starts a copy back, or the nearest before it that all uses wait for.

    Uses that are left out of the planned line may not wait for what stands before them there.
    """
    op: OpId | None = swap_in.anchor
    for _ in range(_LOOKED_BACK):
        if op is None:
            break
        if all(engine.reach.precedes(op, use.op) for use in swap_in.uses):
            return op
        op = line.get(op)
    return swap_in.anchor


def _apply_choice(
    engine: Engine, links: Chain, line: Mapping[OpId, OpId], choice: Choice
) -> Swapped | None:
    graph, phases = engine.graph, engine.phases
    mark = len(graph.journal)
    out: ValueId | None = None
    groups: list[tuple[OpId, tuple[Use, ...]]] = []
    for swap_in in choice.ins:
        anchor = _reaching(engine, line, swap_in)
        bindings = {"v": choice.value, "late": swap_in.uses, "anchor": anchor}
        outcome = engine.apply(Application("swap", bindings))
        if not isinstance(outcome, Applied):
            graph.rollback(mark)  # a use that is left behind would keep the value
            return None
        copy = graph.op(OpId(outcome.made["h"])).outputs[0]
        if out is None:
            out = copy
        else:
            engine.apply(Application("fuse_swap_outs", {"h1": out, "h2": copy}))
        groups.append((OpId(outcome.made["w"]), swap_in.uses))
    if out is None:
        return None
    source = graph.value(out).op
    if choice.gate is not None and links.may_wait(choice.gate, graph.value(choice.value).op):
        gate = choice.gate if choice.gate not in links.heads else hold(engine, Use(choice.gate, 0))
        if gate is not None:
            engine.apply(Application("order", {"a": source, "b": gate}))
    gone = max((phases.level[u.op] for u in graph.uses(choice.value) if u.op < graph.original_ops),
               default=phases.level[graph.value(choice.value).op])  # fmt: skip
    back = min(phases.level[graph.op(w).controls[0]] for w, _ in groups)
    return Swapped(choice.value, source, tuple(groups), gone, back)
