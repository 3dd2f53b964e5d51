"""Finds the schedule of a cut step that keeps a memory limit, by simulating rewritten steps."""

from __future__ import annotations

import contextlib
import math

from tflms import units
from tflms.checkpointing import guard, rivals
from tflms.checkpointing.chain import Chain
from tflms.checkpointing.choices import BESIDE, CHOICES, MANY_STAGES, Choices
from tflms.checkpointing.execute import execute
from tflms.checkpointing.schedule import Schedule
from tflms.checkpointing.stages import Cut
from tflms.checkpointing.weigh import weigh
from tflms.config import Config
from tflms.errors import GraphError, InfeasibleError
from tflms.planning.cost import Costs, Sizes, sizes
from tflms.planning.simulate import Timeline, simulate
from tflms.rewriting.engine import Engine

_ATTEMPTS = 8
_CLOSE = 100  # a peak within so many parts of the limit is as good as it gets
# Threads that run operations side by side hold a value longer than one would: percent kept free.
_LEAST_MARGIN, _MOST_MARGIN = 3, 6
_ROOM_PERCENT = 110  # of the memory that a rival might have, at the most
# So few may all run again each time, where nothing else fits: what lies beside the chain (gradients
# of weights) may grow in the backward phase, so that least is needed where least is kept.
_FEW_STAGES = 40
_NAMED = 4  # values that a refusal lists


class Search:
    """Tries schedules of one chain: each is executed on the graph, and simulated."""

    def __init__(
        self,
        engine: Engine,
        cut: Cut,
        config: Config,
        costs: Costs,
        weights: Sizes,
    ) -> None:
        """Weigh the stages of a step that is not rewritten yet.

        Args:
            engine: for the graph; what it did so far stays.
            cut: the stages.
            config: says which strategy.
            costs: seconds and workspaces.
            weights: bytes of the graph's values.
        """
        self.engine, self.graph, self.cut = engine, engine.graph, cut
        self.config, self.costs, self.strategy = config, costs, str(config.strategy)
        self.mark = len(self.graph.journal)
        self.step = [op for op in cut.phases.order if cut.phases.step[op]]
        self.plain_seconds = math.fsum(costs.seconds[op] for op in self.step)
        self.readers = guard.readers(self.graph, cut.phases.step)
        self.chain = weigh(cut, weights, costs)
        self.beside_bytes = 1 << 62  # the least that a step took beyond what its chain did

    def run(self, limit: int | None) -> tuple[Schedule, Timeline]:
        """Return the quickest schedule that fits, and what is predicted for it.

        Raises:
            InfeasibleError: none fits.
            GraphError: a rule refuses what a schedule asks for.
        """
        if limit is None:
            schedule = CHOICES[self.strategy](self.chain).at(None)
            return schedule, self.executed(schedule)
        given, limit = limit, self._planned(limit)
        fitting: list[tuple[Schedule, Timeline]] = []
        needed: list[tuple[int, str]] = []
        chains = [self.chain, _hopeful(self.chain)]
        for chain in chains:
            if fitting and chain.stages > MANY_STAGES:
                break
            best, lowest = self._within(chain, limit, CHOICES[self.strategy](chain))
            needed.append(lowest)
            if best is not None:
                fitting.append(best)
                if best[0].recomputed_seconds == 0:
                    break
        if self.strategy in BESIDE and self.chain.stages <= MANY_STAGES:
            for name in BESIDE[self.strategy]:
                for chain in chains:
                    self._beside(name, chain, limit, fitting)
        if not fitting and self.strategy in BESIDE and self.chain.stages <= _FEW_STAGES:
            schedule = rivals.recompute_all(self.chain)
            timeline = self.executed(schedule)
            needed.append((timeline.peak_bytes, self._held(timeline)))
            if timeline.peak_bytes <= limit:
                fitting.append((schedule, timeline))
        if not fitting:
            raise self._refuse(given, *min(needed))
        schedule, timeline = min(fitting, key=lambda one: one[1].seconds)
        told = Schedule.of(self.chain, schedule.operations, strategy=schedule.strategy)
        return (schedule if schedule.chain is self.chain else told), timeline

    def _beside(
        self, name: str, chain: Chain, limit: int, fitting: list[tuple[Schedule, Timeline]]
    ) -> None:
        """See whether another strategy does better within the limit; it is put to what fits.

        Tried only where it might: with the room that executed schedules left it at the most.
        """
        choices = CHOICES[name](chain)
        bound = min((timeline.seconds for _, timeline in fitting), default=math.inf)
        room = (limit - self.beside_bytes) * _ROOM_PERCENT // 100
        with contextlib.suppress(InfeasibleError, GraphError):
            if choices.at(max(room, 1)).makespan < bound:
                best, _ = self._within(chain, limit, choices)
                if best is not None and best[1].seconds < bound:
                    fitting.append(best)

    def _within(
        self, chain: Chain, limit: int, choices: Choices
    ) -> tuple[tuple[Schedule, Timeline] | None, tuple[int, str]]:
        """The quickest schedule of a chain that fits, if any; the lowest peak, and what it is."""
        plain = rivals.save_all(chain)
        start = self.executed(plain)
        lowest = start.peak_bytes, self._held(start)
        beside = start.peak_bytes - plain.peak_bytes
        best: tuple[Schedule, Timeline] | None = None
        asked, tried, too_much = limit - beside, set[int](), None
        for _ in range(_ATTEMPTS):
            schedule = _solved(choices, asked)
            if hash(schedule.operations) in tried:
                break
            tried.add(hash(schedule.operations))
            found = self.executed(schedule)
            peak = found.peak_bytes
            self.beside_bytes = min(self.beside_bytes, peak - schedule.peak_bytes)
            if peak < lowest[0]:
                lowest = peak, self._held(found)
            if peak <= limit:
                if best is None or schedule.makespan < best[0].makespan:
                    best = schedule, found
                if schedule.recomputed_seconds == 0 or limit - peak < limit // _CLOSE:
                    break
                asked = max(asked, schedule.peak_bytes) + limit - peak
                if too_much is not None:
                    asked = min(asked, too_much - 1)
            else:
                too_much = asked if too_much is None else min(too_much, asked)
                asked = schedule.peak_bytes - (peak - limit)
                if best is not None:
                    asked = max(asked, (best[0].peak_bytes + too_much) // 2)
        return best, lowest

    def executed(self, schedule: Schedule) -> Timeline:
        """Rewrite the graph to execute a schedule, in place of what was tried before."""
        graph, config = self.graph, self.config
        graph.rollback(self.mark)
        execute(self.engine, self.cut, self.chain, schedule.operations)
        guard.run(self.engine, self.readers, self.cut.phases.step, sorted(self.cut.stage))
        within = {op.id for op in graph.ops() if op.id >= graph.original_ops} | set(self.step)
        weights = sizes(graph, device=config.device, batch_size=config.batch_size)
        return simulate(graph, weights, within, costs=self.costs)

    def _planned(self, limit: int) -> int:
        """What a schedule is found for: the limit less an activation and 0.5 %, within 3 to 6 %."""
        activation = max(self.chain.activation_bytes[1:])
        most = limit * _MOST_MARGIN // 100
        return limit - max(limit * _LEAST_MARGIN // 100, min(activation + limit // 200, most))

    def _enough(self, peak: int) -> int:
        """The least limit for which a schedule with that peak is accepted."""
        limit = peak * 100 // (100 - _LEAST_MARGIN)
        while self._planned(limit) < peak:
            limit += max(1, (peak - self._planned(limit)) // 2)
        return limit

    def _held(self, timeline: Timeline) -> str:
        """Say what is in memory where a step that is rewritten now needs most."""
        graph = self.graph
        if timeline.peak_op is None:
            return "nothing"
        held = [f"{graph.value_name(v)} {units.format_bytes(n)}" for v, n in timeline.top[:_NAMED]]
        return f"{graph.op(timeline.peak_op).name!r} runs: {', '.join(held)}, and variables"

    def _refuse(self, limit: int, peak: int, held: str) -> InfeasibleError:
        size, enough = units.format_bytes, self._enough(peak)
        return InfeasibleError(
            f"memory_limit is {size(limit)}, which strategy {self.config.strategy!r} cannot keep "
            f"with the {self.cut.stages} stages that the step has; the least that it can do is "
            f"{size(enough)} (predicted). Most is held when {held}. strategy='auto' swaps and may "
            "go lower; a smaller batch does as well",
            minimum_bytes=enough,
        )


def _solved(choices: Choices, asked: int) -> Schedule:
    """The schedule for a limit; for one that is too small, the most saving one."""
    try:
        return choices.at(max(asked, 1))
    except InfeasibleError as error:
        if error.minimum_bytes is None:
            raise
        return choices.at(error.minimum_bytes)


def _hopeful(chain: Chain) -> Chain:
    """A chain whose backward takes no room, for limits that are, or seem, too small.

    The model lets go of all that a stage's backward reads at its end, and of nothing before. A
    real one lets go of it one by one, so that its gradients may find room there. Whether they do,
    the simulation says.
    """
    return Chain(
        forward_seconds=chain.forward_seconds,
        backward_seconds=chain.backward_seconds,
        activation_bytes=chain.activation_bytes,
        saved_bytes=chain.saved_bytes,
        gradient_bytes=(0,) * (chain.stages + 1),
        forward_overhead_bytes=chain.forward_overhead_bytes,
        forward_only_seconds=chain.forward_only_seconds,
        forward_only_overhead_bytes=chain.forward_only_overhead_bytes,
    )
