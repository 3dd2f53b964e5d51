"""The strategies that recompute: a training step is cut, weighed, scheduled and rewritten."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tflms import units
from tflms.checkpointing import guard, optimal, rivals
from tflms.checkpointing.chain import Chain
from tflms.checkpointing.execute import execute
from tflms.checkpointing.execute import recomputed_in as recomputed_in
from tflms.checkpointing.revolve import revolve
from tflms.checkpointing.schedule import Schedule
from tflms.checkpointing.stages import Cut, cut
from tflms.checkpointing.weigh import weigh
from tflms.config import Config
from tflms.errors import InfeasibleError
from tflms.graph import order
from tflms.graph.ir import Graph, OpId
from tflms.graph.order import Phases
from tflms.planning.cost import Costs, sizes
from tflms.planning.simulate import Timeline, simulate
from tflms.rewriting.engine import Engine
from tflms.strategies import shapes, siblings

Solver = Callable[[Chain, int | None], Schedule]
_ATTEMPTS = 8
_CLOSE = 100  # a peak within so many parts of the limit is as good as it gets
# Threads that run operations side by side hold a value longer than one would: percent kept free.
_LEAST_MARGIN, _MOST_MARGIN = 3, 6


def _dropping(chain: Chain, limit: int | None) -> Schedule:
    return optimal.drop_inputs(chain, _limited(limit)).dropping


def _limited(limit: int | None) -> int:
    assert limit is not None  # Config asks for one
    return limit


SOLVERS: dict[str, Solver] = {
    "optimal_checkpointing": lambda c, m: optimal.optimal_schedule(c, _limited(m)),
    "drop_inputs": _dropping,
    "save_all": rivals.save_all,
    "recompute_all": rivals.recompute_all,
    "periodic": rivals.periodic,
    "best_periodic": rivals.best_periodic,
    "sqrt_n": rivals.sqrt_n,
    "revolve": lambda c, m: revolve(c, _limited(m)),
    "revolve_heterogeneous": lambda c, m: optimal.revolve_heterogeneous(c, _limited(m)),
}


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A step that was rewritten to execute a schedule.

    Attributes:
        engine: with all rule applications in its log.
        schedule: what was executed; its memory counts the chain alone.
        cut: the stages.
        timeline: prediction for the rewritten step.
        plain_seconds: of the step as it was, by the same costs.
    """

    engine: Engine
    schedule: Schedule
    cut: Cut
    timeline: Timeline
    plain_seconds: float

    def told(self) -> tuple[str, ...]:
        """Say what was done, in a sentence or two."""
        return (
            f"the step was cut into {self.cut.stages} stages (tflms.checkpointing.measure_chain "
            "shows them)",
            f"schedule {self.schedule}",
        )


def run(
    graph: Graph, phases: Phases, config: Config, costs: Costs, limit: int | None
) -> Checkpointed:
    """Rewrite a step so that it recomputes what does not fit.

    The schedule's own limit is the device's less what is not the chain's: variables, gradients of
    weights, masks. How much that is shows when the rewritten step is simulated; if it does not fit,
    or leaves room, the schedule is found anew for a limit that is corrected by the difference.

    Args:
        graph: the graph as it was read.
        phases: its phases.
        config: ``strategy`` says which schedule.
        costs: seconds and workspaces.
        limit: bytes on the device, of which some percent are kept free; None where the strategy
            needs none.

    Raises:
        GraphError: the step is no chain.
        InfeasibleError: no schedule of this kind fits; ``minimum_bytes`` is what the one that
            needs least needs.
    """
    return _Search(graph, phases, config, costs).run(limit)


class _Search:
    def __init__(self, graph: Graph, phases: Phases, config: Config, costs: Costs) -> None:
        self.graph, self.config, self.costs = graph, config, costs
        self.cut = cut(graph, phases)
        self.phases = phases
        self.engine = Engine(graph, phases, host_device=config.host_device, order=self._order())
        shapes.run(self.engine)
        self.mark = len(graph.journal)
        self.plain_seconds = math.fsum(costs.seconds[op] for op in self._step())
        self.readers = guard.readers(graph, sorted(self.cut.stage))
        weights = sizes(graph, device=config.device, batch_size=config.batch_size)
        self.chain = weigh(self.cut, weights, costs)
        self.solve = SOLVERS[str(config.strategy)]

    def run(self, limit: int | None) -> Checkpointed:
        if limit is None:
            return self._executed(self.solve(self.chain, None))
        given, limit = limit, self._planned(limit)
        plain = self._executed(rivals.save_all(self.chain))
        beside = plain.timeline.peak_bytes - plain.schedule.peak_bytes
        best: Schedule | None = None
        lowest: int | None = None
        asked, tried, too_much = limit - beside, set[int](), None
        for _ in range(_ATTEMPTS):
            schedule = self._solved(asked)
            if schedule is None or hash(schedule.operations) in tried:
                break
            tried.add(hash(schedule.operations))
            found = self._executed(schedule)
            peak = found.timeline.peak_bytes
            lowest = peak if lowest is None else min(lowest, peak)
            if peak <= limit:
                if best is None or schedule.makespan < best.makespan:
                    best = schedule
                if schedule.recomputed_seconds == 0 or limit - peak < limit // _CLOSE:
                    break
                asked = max(asked, schedule.peak_bytes) + limit - peak
                if too_much is not None:
                    asked = min(asked, too_much - 1)
            else:
                too_much = asked if too_much is None else min(too_much, asked)
                asked = schedule.peak_bytes - (peak - limit)
                if best is not None:
                    asked = max(asked, (best.peak_bytes + too_much) // 2)
        if best is None:
            raise self._refuse(given, lowest and self._enough(lowest))
        return self._executed(best)

    def _planned(self, limit: int) -> int:
        """What a schedule is found for: the limit less one activation, within 3 to 6 % of it."""
        activation = max(self.chain.activation_bytes[1:])
        most = limit * _MOST_MARGIN // 100
        return limit - max(limit * _LEAST_MARGIN // 100, min(activation, most))

    def _enough(self, peak: int) -> int:
        """The least limit for which a schedule with that peak is accepted."""
        limit = peak * 100 // (100 - _LEAST_MARGIN)
        while self._planned(limit) < peak:
            limit += max(1, (peak - self._planned(limit)) // 2)
        return limit

    def _solved(self, asked: int) -> Schedule | None:
        """The schedule for a limit; for one that is too small, the most saving one."""
        try:
            return self.solve(self.chain, max(asked, 1))
        except InfeasibleError as error:
            if error.minimum_bytes is None:
                raise
            return self.solve(self.chain, error.minimum_bytes)

    def _executed(self, schedule: Schedule) -> Checkpointed:
        graph, config = self.graph, self.config
        graph.rollback(self.mark)
        execute(self.engine, self.cut, self.chain, schedule.operations)
        guard.run(self.engine, self.readers)
        within = {op.id for op in graph.ops() if op.id >= graph.original_ops} | set(self._step())
        weights = sizes(graph, device=config.device, batch_size=config.batch_size)
        timeline = simulate(graph, weights, within, costs=self.costs)
        return Checkpointed(self.engine, schedule, self.cut, timeline, self.plain_seconds)

    def _step(self) -> list[OpId]:
        return [op for op in self.phases.order if self.phases.step[op]]

    def _order(self) -> Sequence[OpId] | None:
        """An order in which what lets go of an activation runs before its sibling."""
        pairs = siblings.pairs(self.graph, self.phases)
        return order.with_edges(self.graph, self.phases.order, pairs)

    def _refuse(self, limit: int, lowest: int | None) -> InfeasibleError:
        size = units.format_bytes
        least = (
            "" if lowest is None else f"; the least that it can do is {size(lowest)} (predicted)"
        )
        return InfeasibleError(
            f"memory_limit is {size(limit)}, which strategy {self.config.strategy!r} cannot keep "
            f"with the {self.cut.stages} stages that the step has{least}. strategy='auto' swaps "
            "and may go lower; a smaller batch does as well",
            minimum_bytes=lowest,
        )
