"""The strategies that recompute: a training step is cut, weighed, scheduled and rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tflms.checkpointing import rounding, updates
from tflms.checkpointing.execute import recomputed_in as recomputed_in
from tflms.checkpointing.gradients import Spine
from tflms.checkpointing.schedule import Schedule
from tflms.checkpointing.search import Search
from tflms.checkpointing.stages import Cut, cuts
from tflms.config import Config
from tflms.errors import GraphError, InfeasibleError, TflmsError
from tflms.graph import order as order_of
from tflms.graph.ir import Graph, OpId
from tflms.graph.order import Phases
from tflms.planning.cost import Costs, Sizes, sizes
from tflms.planning.floor import floor, refuse
from tflms.planning.simulate import Replay, Timeline
from tflms.rewriting.engine import Application, Engine
from tflms.strategies import shapes, siblings

_NAMED = 6  # kept values that a note lists
_LARGE_PERCENT = 2  # of the limit: less is covered by what is kept free
_SMALL = 64  # what is less than this part of the largest value is not worth a control edge


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
        cut, graph = self.cut, self.cut.graph
        notes = [
            f"the step was cut into {cut.stages} stages (tflms.checkpointing.measure_chain "
            "shows them)"
        ]
        if carried := cut.carried:
            names = ", ".join(graph.value_name(v) for v in carried[:_NAMED])
            more = f" and {len(carried) - _NAMED} more" if len(carried) > _NAMED else ""
            notes.append(f"kept across stages, as later ones read them too: {names}{more}")
        return (*notes, f"schedule {self.schedule}")


def run(
    graph: Graph, phases: Phases, config: Config, costs: Costs, limit: int | None
) -> Checkpointed:
    """Rewrite a step so that it recomputes what does not fit.

    The schedule's own limit is the device's less what is not the chain's: variables, gradients of
    weights, masks. How much that is shows when the rewritten step is simulated; if it does not fit,
    or leaves room, the schedule is found anew for a limit that is corrected by the difference.
    Where a step can be cut in several ways, the quickest that fits is taken.

    Args:
        graph: the graph as it was read.
        phases: its phases.
        config: ``strategy`` says which schedule.
        costs: seconds and workspaces.
        limit: bytes on the device, of which some percent are kept free; None where the strategy
            needs none.

    Raises:
        GraphError: the step is no chain, or might round otherwise.
        InfeasibleError: no schedule of this kind fits; ``minimum_bytes`` is what the one that
            needs least needs.
    """
    weights = sizes(graph, device=config.device, batch_size=config.batch_size)
    ways = cuts(graph, phases, weights=weights)
    _check_constants(graph, ways[0])
    pairs = siblings.pairs(graph, phases)
    order = planned_order(graph, phases, ways[0].spine, pairs)
    engine = Engine(graph, phases, host_device=config.host_device, order=order)
    shapes.run(engine)
    release_first(engine, weights, pairs)
    if limit is not None:
        updates.few_at_a_time(engine, ways[0].spine, weights, limit * _LARGE_PERCENT // 100)
    mark = len(graph.journal)
    found: list[tuple[float, Search, Schedule]] = []
    refused: list[TflmsError] = []
    for way in ways:
        graph.rollback(mark)
        search = Search(engine, way, config, costs, weights)
        try:
            schedule, timeline = search.run(limit)
        except (InfeasibleError, GraphError) as error:
            refused.append(error)
            continue
        worth = timeline.peak_bytes if limit is None else timeline.seconds
        found.append((worth, search, schedule))
    if not found:
        graph.rollback(0)
        raise _refusal(graph, phases, weights, costs, limit, min(refused, key=_least))
    _, search, schedule = min(found, key=lambda one: one[0])
    timeline = search.executed(schedule)
    return Checkpointed(engine, schedule, search.cut, timeline, search.plain_seconds)


def _check_constants(graph: Graph, cut: Cut) -> None:
    """Refuse a step that might round otherwise once it is rewritten."""
    op = rounding.unsettled(graph, sorted(cut.stage))
    if op is not None:
        raise GraphError(
            f"{graph.op(op).name!r} is one of several products in a row with three constant "
            "factors or more. TensorFlow multiplies such constants with each other in an order "
            "that depends on what else is in the graph, so the last bits might differ once the "
            "step is rewritten; multiply them in the program, so that one or two are left"
        )


def planned_order(
    graph: Graph, phases: Phases, spine: Spine, pairs: Sequence[tuple[OpId, OpId]]
) -> Sequence[OpId] | None:
    """Return an order of all operations in which gradients come as the spine has them.

    What lets go of an activation runs before its sibling, where that agrees with it.
    """
    row = list(pairwise(spine.ops))
    return order_of.with_edges(graph, phases.order, [*row, *pairs]) or order_of.with_edges(
        graph, phases.order, row
    )


def order_for(graph: Graph, phases: Phases, config: Config) -> Sequence[OpId] | None:
    """Return the order in which a step was rewritten, to play a saved plan of it again."""
    weights = sizes(graph, device=config.device, batch_size=config.batch_size)
    spine = cuts(graph, phases, weights=weights)[0].spine
    return planned_order(graph, phases, spine, siblings.pairs(graph, phases))


def release_first(engine: Engine, weights: Sizes, pairs: Sequence[tuple[OpId, OpId]]) -> None:
    """Let what reads an activation for the last time run before a sibling that makes another."""
    graph = engine.graph
    large = max(weights.nbytes, default=0) // _SMALL
    for reader, sibling in pairs:
        if any(weights.nbytes[v] >= max(large, 1) for v in graph.op(sibling).outputs):
            engine.apply(Application("order", {"a": reader, "b": sibling}))


def _refusal(
    graph: Graph,
    phases: Phases,
    weights: Sizes,
    costs: Costs,
    limit: int | None,
    error: TflmsError,
) -> TflmsError:
    """Return the error to raise: where no plan at all keeps a limit, which operation is why."""
    if limit is None or not isinstance(error, InfeasibleError):
        return error
    step = [op for op in phases.order if phases.step[op]]
    persistent = Replay(graph, weights, set(step), costs).persistent_bytes
    lowest = floor(graph, weights, costs, step, persistent)
    if limit >= lowest.nbytes:
        return error
    return refuse(graph, lowest, limit, max(lowest.nbytes, error.minimum_bytes or 0))


def _least(error: TflmsError) -> tuple[bool, float]:
    """Put what could be met with a higher limit first, the lowest of them before others."""
    needed = error.minimum_bytes if isinstance(error, InfeasibleError) else None
    return needed is None, needed or 0
