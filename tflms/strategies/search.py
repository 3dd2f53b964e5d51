"""Looks for swaps that keep a limit: decides, applies, predicts, and undoes what does not fit.

Strictly first: what comes next waits for each copy, so that buffers come and go in one order only,
which can be predicted to the byte; limits close to the floor are met, at the price of time in which
the device waits. Then copies may take their time, those first that have most room, as long as all
fits however long they take. Where the device still waits for copies, what is cheap is
computed again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tflms.graph.ir import OpId, ValueId
from tflms.planning import auto
from tflms.planning.allocator import overflow
from tflms.planning.auto import Decision, Problem
from tflms.planning.cost import Costs, Sizes, with_inserted
from tflms.planning.simulate import Replay, Timeline
from tflms.planning.unordered import over
from tflms.rewriting.engine import Engine
from tflms.strategies import again, joins, mixing
from tflms.strategies.gaps import all_gaps
from tflms.strategies.holes import (
    ROOM_PER_MILLE,
    TIGHT_ROOMS_PER_MILLE,
    TIGHT_VARIANTS,
    VARIANTS,
    Spill,
    in_the_way,
    least_limit,
)
from tflms.strategies.least import fewer
from tflms.strategies.lines import Chain, chain, deferred, fix_order
from tflms.strategies.parking import apply, renumbered, without
from tflms.strategies.swap import Swapped

_ATTEMPTS = 60  # for a graph that is small; fewer for larger ones, so that planning takes seconds
_FEWEST_ATTEMPTS, _ATTEMPTS_AT_ONCE = 10, 5
_ATTEMPTS_RELAXED = 6
_RELAXATIONS = 4
_PATIENCE = 2  # aims that are lower and no better
_AIMS_PERCENT = (100, 92, 85, 70)  # of the limit: where little is parked, little can be moved about
_AIMS_RELAXED_PERCENT = (95, 93, 91, 89, 85, 80, 74)
_AIMS_MIXED_PERCENT = (85, 89, 93, 80, 74)  # what is computed again needs room in between
_SPILLS_RELAXED = 6  # buffers that find no room, for which room is made at once
_NEAR = (6, 16)  # operations of the line: how soon what is read again has to be needed anyway
_WORTH = 0.98  # of the time without: computing again has to save so much
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


@dataclass(frozen=True, slots=True)
class _Variant:
    """A decision for the graph with cheap values computed again; ``near`` is 0 where none are."""

    kept: _Kept
    near: int
    part: float | None
    seeds: tuple[OpId, ...]


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
        recompute: whether values may be computed again.
        joined: concatenations that the host does.
        aims_percent: of the limit, what copies that take their time may leave on the device.
        room_per_mille: of the limit, into which buffers must fit.
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
    recompute: bool = True
    joined: Sequence[joins.Joined] = ()
    aims_percent: Sequence[int] = _AIMS_RELAXED_PERCENT
    room_per_mille: int = ROOM_PER_MILLE
    tried: list[tuple[int, Replay, list[OpId]]] = dataclasses.field(default_factory=list)

    def run(self) -> Found | None:
        """Rewrite the graph so that it keeps the limit; leave it as it was where nothing does."""
        graph = self.engine.graph
        start = len(graph.journal)
        links, edges = self._lined_up()
        variants: list[_Variant] = []
        for room in self._rooms():
            self.room_per_mille = room
            if variants := self._variants_of(links):
                break
        if not variants:
            graph.rollback(start)
            return None
        best = min(variants, key=_weighed)
        search: Search | None = None
        if best.near:
            search = self._with_again(links, best.near, best.part)
        seeds = dict(zip(best.seeds, again.seeds(graph), strict=True))
        decision = renumbered(best.kept.decision, seeds)
        swapped = apply(self.engine, links, decision, best.kept.setup.relaxed)
        timeline, _ = (search or self)._judge(links)  # the same, of the operations that stay
        return Found(swapped, timeline, edges)

    def _variants_of(self, links: Chain) -> list[_Variant]:
        """Ways to keep the limit: with nothing computed again, and with what is cheap."""
        found = self._found(links)
        variants = [] if found is None else [_Variant(found, 0, None, ())]
        if not self.recompute or (found is not None and not _stalls(found.timeline)):
            return variants
        if found is None:
            return [one for near in _NEAR if (one := self._variant(links, near, None)) is not None]
        variants += mixing.variants(lambda part: self._variant(links, _NEAR[-1], part), _weighed)
        return variants

    def _variant(self, links: Chain, near: int, part: float | None) -> _Variant | None:
        """A way to keep the limit with something computed again; the graph is left as it is."""
        graph = self.engine.graph
        mark = len(graph.journal)
        other = self._with_again(links, near, part)
        kept = None if other is None else other._found(links)
        found = None if kept is None else _Variant(kept, near, part, again.seeds(graph))
        graph.rollback(mark)
        return found

    def keeps(self) -> bool:
        """Tell whether ``run`` finds a rewrite at once; it may where this says no."""
        graph = self.engine.graph
        start = len(graph.journal)
        links, _ = self._lined_up()
        self.room_per_mille = self._rooms()[0]
        kept = self._aim(problem(self, links), links, _ATTEMPTS_AT_ONCE)
        graph.rollback(start)
        return kept is not None

    def _rooms(self) -> tuple[int, ...]:
        return TIGHT_ROOMS_PER_MILLE if self.tight else (ROOM_PER_MILLE,)

    def _lined_up(self) -> tuple[Chain, int]:
        """Fix the order of what touches much memory; return that, and how many edges it took."""
        graph = self.engine.graph
        links = chain(
            graph, self.engine.phases, self.weights, self.order, self._least(),
            default_kind=self.default_kind,
        )  # fmt: skip
        edges = fix_order(self.engine, links)
        joins.settle(self.engine, links, self.joined)
        self.weights = with_inserted(graph, self.weights)  # the edges keep some from being fused
        return links, edges

    def _found(self, links: Chain) -> _Kept | None:
        """A decision that keeps the limit and takes little time; the graph is left as it is."""
        kept = self._aim(problem(self, links), links, self._attempts())
        return kept if kept is None or self.tight else self._relax(kept, links)

    def _with_again(self, links: Chain, near: int, part: float | None) -> Search | None:
        """Have cheap values computed again; return the search that goes on from there, or None."""
        engine = self.engine
        values = again.run(
            engine, links, self.wanted, weights=self.weights, costs=self.costs,
            room=self.limit - self.replay.persistent_bytes, near=near,
            part=part, default_kind=self.default_kind,
        )  # fmt: skip
        if not values:
            return None
        graph = engine.graph
        step = self.step | {op.id for op in graph.ops() if op.joins_step}
        weights = with_inserted(graph, self.weights)
        return dataclasses.replace(
            self, weights=weights, step=step, wanted=self.wanted - values, tried=[],
            aims_percent=_AIMS_MIXED_PERCENT,
            order=[op for op in engine.witness if op in step],
            replay=Replay(graph, weights, step, self.costs, like=self.replay),
        )  # fmt: skip

    @property
    def tight(self) -> bool:
        """Whether the limit is so close to the floor that no copy may take its time."""
        return self.limit < _TIGHT * self.floor

    def least_limit(self) -> int:
        """About the smallest limit that the plan with the lowest peak of those tried would keep."""
        return least_limit(self.tried, self.waste, int(_TIGHT * self.floor))

    def _variants(self) -> Sequence[tuple[int, bool]]:
        return TIGHT_VARIANTS if self.tight else VARIANTS

    def _aim(self, setup: Problem, links: Chain, attempts: int) -> _Kept | None:
        """Aim at the limit, then lower and lower."""
        for percent in _AIMS_PERCENT:
            aim = dataclasses.replace(setup, limit=setup.limit * percent // 100)
            if (kept := self._keep(aim, links, attempts)) is not None:
                return kept
        return None

    def _keep(
        self, setup: Problem, links: Chain, attempts: int, *, within: float = math.inf
    ) -> _Kept | None:
        """Look for a decision that keeps the limit within a time; the graph is left as it is."""
        graph = self.engine.graph
        mark = len(graph.journal)
        for _ in range(attempts):
            decision = auto.decide(setup)
            done = apply(self.engine, links, decision, setup.relaxed)
            timeline, spills = self._judge(links, _SPILLS_RELAXED if setup.relaxed else 1)
            more = in_the_way(graph, setup, decision, spills)
            graph.rollback(mark)
            if timeline.peak_bytes <= self.limit and not spills:
                over = self.host_limit is not None and timeline.host_peak_bytes > self.host_limit
                return None if over else _Kept(setup, decision, timeline)
            stay = {one.value for one in decision.choices} - {one.value for one in done}
            if spills:
                stay &= set(setup.away)
            if timeline.seconds >= within:
                break  # to make room takes more time, not less
            if stay:  # they were asked to go, and a rule refuses them: others have to
                setup = without(setup, stay)
            elif more is not None:
                setup = dataclasses.replace(setup, away=more)
            elif decision.exhausted:
                break
            else:
                down = max((timeline.peak_bytes - self.limit) // 2, self.limit // 100)
                setup = dataclasses.replace(setup, limit=setup.limit - down)
        return None

    def _relax(self, strict: _Kept, links: Chain) -> _Kept:
        """Let copies take their time: all of them, or as many as the limit allows."""
        if not _stalls(strict.timeline):
            return strict
        best = self._relax_all(strict, links)
        return self._relax_roomiest(strict, links) if best is None else best

    def _relax_all(self, strict: _Kept, links: Chain) -> _Kept | None:
        """Aim at one part of the limit after another; of what fits, take the fastest.

        What is held closer to the limit leaves holes that are too small, and filling these again
        costs more time than a little less memory does.
        """
        best: _Kept | None = None
        since = 0  # tries since the best
        everything = frozenset(strict.setup.gaps)
        for percent in self.aims_percent:
            aim = self.limit * percent // 100
            setup = dataclasses.replace(strict.setup, relaxed=everything, away={}, limit=aim)
            within = strict.timeline.seconds if best is None else best.timeline.seconds
            attempts = self._attempts() // len(self.aims_percent)
            kept = self._keep(setup, links, attempts, within=within)
            since += best is not None
            if kept is not None and (best is None or _seconds(kept) < _seconds(best)):
                best, since = kept, 0
            if best is not None and (since == _PATIENCE or not _stalls(best.timeline)):
                break
        return best if best is None or best.timeline.seconds < strict.timeline.seconds else strict

    def _relax_roomiest(self, strict: _Kept, links: Chain) -> _Kept:
        """Let as many copies take their time as the limit allows, those with most room first."""
        best, values = strict, strict.decision.roomiest
        low, high = 0, len(values) + 1
        for _ in range(_RELAXATIONS):
            count = (low + high) // 2
            if not low < count < high:
                break
            relaxed = frozenset(values[:count])
            away = {v: at for v, at in strict.setup.away.items() if v not in relaxed}
            setup = dataclasses.replace(strict.setup, relaxed=relaxed, away=away)
            kept = self._keep(setup, links, _ATTEMPTS_RELAXED)
            if kept is None:
                high = count
            else:
                low = count
                if kept.timeline.seconds < best.timeline.seconds:
                    best = kept
        return best

    def _attempts(self) -> int:
        return fewer(_ATTEMPTS, len(self.order), fewest=_FEWEST_ATTEMPTS)

    def _least(self) -> int:
        """Bytes that an operation has to touch to have its place in the order."""
        graph = self.engine.graph
        sized = [self.weights.nbytes[v] for v in self.wanted if graph.value(v).op in self.step]
        peak = self.replay.run(self.order).peak_bytes
        return max(1, min(peak // _SIGNIFICANT, max(sized, default=1) // 4))

    def _judge(self, links: Chain, most: int = 1) -> tuple[Timeline, list[Spill]]:
        """Predict the rewritten step, and what finds no room in it: up to so many buffers."""
        graph = self.engine.graph
        inserted = self.step | {op.id for op in graph.ops() if op.joins_step}
        weights = with_inserted(graph, self.weights)
        replay = Replay(graph, weights, inserted, self.costs, like=self.replay)
        planned = [o for o in self.engine.witness if o in inserted]
        timeline = replay.run(planned)
        apart = deferred(graph, links, planned)
        if apart is not None:  # the executor may leave what the updates do not need for later
            timeline = max(timeline, replay.run(apart), key=lambda t: t.peak_bytes)
        spills: list[Spill] = []
        variants = self._variants()
        for pace, scattered in variants if timeline.peak_bytes <= self.limit else ():
            ran = apart if apart is not None and pace == variants[-1][0] else planned
            asked = replay.events(ran, pace)
            room = self.limit * self.room_per_mille // 1000
            found = overflow(
                asked.persistent, asked.events, room, waste=self.waste, scattered=scattered
            )
            if found is not None:
                spills.append(Spill(asked, found, ran))
                if len(spills) == most:
                    break
        if not spills and timeline.peak_bytes <= self.limit:
            peak = over(graph, replay, inserted, planned, self.limit, links.merged)
            timeline = timeline if peak is None else dataclasses.replace(timeline, peak_bytes=peak)
        if spills or timeline.peak_bytes > self.limit or self.host_limit is not None:
            self.tried.append((timeline.peak_bytes, replay, planned))
        return timeline, spills


def _stalls(timeline: Timeline) -> bool:
    """Tell whether the device waits for copies for long."""
    return timeline.stall_seconds >= _NO_STALL * timeline.seconds


def _seconds(kept: _Kept) -> float:
    return kept.timeline.seconds


def _weighed(variant: _Variant) -> float:
    """Seconds; computing again has to be worth it."""
    return _seconds(variant.kept) * (1.0 if variant.near else _WORTH)


def problem(search: Search, links: Chain) -> Problem:
    """Set up what the planner decides about, from the timeline of the ordered graph."""
    graph, costs = search.engine.graph, search.costs
    timeline = search.replay.run(search.order)
    order = timeline.order
    place = {op: i for i, op in enumerate(order)}
    seconds = search.replay.seconds(order)
    in_chain = np.zeros(len(order), bool)
    in_chain[[place[op] for op in links.ops]] = True
    gates = np.zeros(len(order), bool)
    gates[[place[op] for op in links.firm]] = True
    gaps = all_gaps(graph, order, gates, search.wanted | search.pins, search.weights)
    return Problem(
        order, np.asarray(timeline.resident, np.int64), np.cumsum(seconds) - seconds, seconds,
        in_chain, gates, gaps, costs, search.limit, search.host_limit, pins=search.pins,
        swept=search.pins if search.tight else frozenset(),
    )  # fmt: skip
