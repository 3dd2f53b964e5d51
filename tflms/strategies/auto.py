"""The strategy ``auto``: a whole-step order, and swaps that keep a memory limit at every moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tflms.config import Config
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases, replaced, with_edges
from tflms.planning.cost import Costs, Sizes, device_kind, main_device, sizes, with_inserted
from tflms.planning.floor import Floor, floor, refuse
from tflms.planning.packing import waste_of
from tflms.planning.schedule import least_peak, list_schedule
from tflms.planning.simulate import Replay, Timeline
from tflms.rewriting.engine import Engine
from tflms.strategies import biases, joins, shapes, starts
from tflms.strategies.least import fewer, least_limit
from tflms.strategies.search import Found, Search
from tflms.strategies.swap import Swapped, paired, selection

_SMALLER_PERCENT = (98, 96, 93)  # of a limit for which nothing is found
_FIRST_PERCENT = 103  # of the floor: what is tried first where a limit below it was refused


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the strategy did.

    Attributes:
        engine: with all rule applications in its log.
        swapped: the values that were parked.
        timeline: prediction for the rewritten graph in its planned order.
        floor: what no plan can go below.
        order_edges: control edges that fix the order.
        order: the planned order of all of the user's operations, before anything was inserted.
    """

    engine: Engine
    swapped: list[Swapped]
    timeline: Timeline
    floor: Floor
    order_edges: int
    order: tuple[OpId, ...]


def run(
    graph: Graph,
    phases: Phases,
    config: Config,
    costs: Costs,
    limit: int,
    *,
    default_kind: str = "CPU",
) -> Outcome:
    """Order a step and park values so that it keeps a memory limit.

    Args:
        graph: the graph; it is rewritten.
        phases: its phases.
        config: which values may be parked, and where.
        costs: what operations and copies take.
        limit: bytes that the step may hold on the device.
        default_kind: the kind of device that runs operations which name none.

    Raises:
        InfeasibleError: the limit is below the floor, or no choice of swaps meets it.
    """
    start = len(graph.journal)
    ways: list[bool] = []
    for join in (False, True):  # what the host puts together makes the device wait
        prepared = _prepared(graph, phases, config, costs, default_kind, join=join)
        if join and not prepared.joined:
            break
        ways.append(join)
        lowest = prepared.floor
        search, found = _found(prepared, limit)
        if found is not None:
            swapped = [*found.swapped, *_joined(search.engine, search.joined, found.swapped)]
            return Outcome(
                search.engine, swapped, found.timeline, lowest, found.order_edges, prepared.whole
            )
        graph.rollback(start)
    last = [search]

    def keeps(other: int) -> bool:
        for join in ways:
            graph.rollback(start)
            prepared = _prepared(graph, phases, config, costs, default_kind, join=join)
            if prepared.may_try(other):
                last[0] = prepared.search(other)
                if last[0].keeps():
                    return True
        return False

    below = limit < lowest.nbytes
    least = least_limit(
        keeps,
        lambda: last[0].least_limit() if last[0].tried else 0,
        refused=lowest.nbytes - 1 if below else limit,
        first=search.least_limit() if search.tried else lowest.nbytes * _FIRST_PERCENT // 100,
        operations=len(search.order),
    )
    graph.rollback(start)
    raise refuse(graph, lowest, limit, least, host_limit=search.host_limit)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step with its order planned, and what stays the same whatever the limit is."""

    search: Callable[[int], Search]
    whole: tuple[OpId, ...]
    floor: Floor
    joined: Sequence[joins.Joined]

    def may_try(self, limit: int) -> bool:
        """Tell whether a plan for a limit may be looked for.

        Buffers that the host puts together are the largest; so close to the floor that no copy may
        take its time, they found no room in some runs, for where small buffers lie is chance.
        """
        if limit < self.floor.nbytes:
            return False
        return not (self.joined and self.search(limit).tight)


def _found(prepared: _Prepared, limit: int) -> tuple[Search, Found | None]:
    """Look for a plan that keeps a limit, or else a somewhat smaller one, which keeps it as well.

    Which buffer finds which hole changes with the limit, so that a smaller one may be met by a plan
    that is not found for the larger.
    """
    first = prepared.search(limit)
    if not prepared.may_try(limit):
        return first, None
    found = first.run()
    for percent in _SMALLER_PERCENT[: fewer(len(_SMALLER_PERCENT), len(first.order))]:
        other = prepared.search(limit * percent // 100)
        if found is not None or not prepared.may_try(other.limit):
            break
        if (found := other.run()) is not None:
            return other, found
    return first, found


def _joined(
    engine: Engine, joined: Sequence[joins.Joined], swapped: Sequence[Swapped]
) -> list[Swapped]:
    """What the host puts together, and its parts, as values that are parked."""
    graph, level = engine.graph, engine.phases.level
    found = [joins.as_swapped(engine, one) for one in joined]
    known = {one.swap_out for one in swapped}
    for part in (part for one in joined for part in one.parts if part not in known):
        value = graph.op(part).inputs[0]
        made = level[graph.value(value).op]
        found.append(Swapped(value, part, (), made, made))
    return found


def _prepared(
    graph: Graph, phases: Phases, config: Config, costs: Costs, default_kind: str, *, join: bool
) -> _Prepared:
    step = {op.id for op in graph.ops() if phases.step[op.id]}
    weights = sizes(graph, device=config.device, batch_size=config.batch_size)
    wanted = _wanted(graph, phases, config, default_kind)
    order = _ordered(graph, phases, weights, step, wanted)
    outside = [op for op in phases.order if op not in step]
    order = [op for op in _mergeable(graph, [*order, *outside], default_kind) if op in step]
    whole = _whole(graph, order, outside)
    engine = Engine(graph, phases, host_device=config.host_device, order=whole)
    shapes.run(engine)
    starts.run(engine, step)
    pins = _wanted(graph, phases, config.replace(min_swap_bytes=0), default_kind) - wanted
    joined: list[joins.Joined] = []
    if join:
        weights = with_inserted(graph, weights)
        order = [op for op in engine.witness if op in step]
        found = joins.candidates(graph, phases, weights, costs, order, wanted | pins)
        joined = joins.run(engine, found, order)
    step |= {op.id for op in graph.ops() if op.joins_step}
    step -= replaced(graph)
    weights = sizes(graph, device=config.device, batch_size=config.batch_size)
    order = [op for op in engine.witness if op in step]
    replay = Replay(graph, weights, step, costs)
    lowest = floor(graph, weights, costs, order, replay.persistent_bytes)
    host_limit = None if config.host_memory_limit is None else int(config.host_memory_limit)
    kind = device_kind(config.device or main_device(graph), default_kind)

    def search(limit: int) -> Search:
        return Search(
            engine, weights, costs, step, order, replay, wanted, frozenset(pins), limit,
            lowest.nbytes, host_limit, waste_of(kind), default_kind, config.recompute, joined,
        )  # fmt: skip

    return _Prepared(search, tuple(whole), lowest, joined)


def _wanted(graph: Graph, phases: Phases, config: Config, default_kind: str) -> set[ValueId]:
    """The activations that the filters admit and whose uses may read a copy."""
    return {
        v
        for v in selection(graph, config)
        if v < len(phases.activation)
        and phases.activation[v]
        and not any(paired(graph, use, default_kind) for use in graph.uses(v))
    }


def _ordered(
    graph: Graph, phases: Phases, weights: Sizes, step: set[OpId], wanted: set[ValueId]
) -> list[OpId]:
    """The order, of a few, that needs least when what waits for its use may be on the host."""
    late = {op for op in step if not phases.forward[op]}
    parked = {
        v
        for v in wanted
        if graph.value(v).op not in late and any(use.op in late for use in graph.uses(v))
    }
    orders = [
        list_schedule(graph, weights, step),
        list_schedule(graph, weights, step, parked=parked, late=late),
        list_schedule(graph, weights, step, parked=parked, late=late, lightest=True),
    ]
    return min(orders, key=lambda order: least_peak(graph, weights, order, parked))


def _mergeable(graph: Graph, order: list[OpId], default_kind: str) -> list[OpId]:
    """The order with gradients of biases behind those that the runtime merges them with."""
    merged = biases.merged(graph, order, default_kind)
    pairs = [(weight, behind) for weight, _, others in merged for behind in others]
    found = with_edges(graph, order, pairs)
    if found is not None:
        return found
    kept: list[tuple[OpId, OpId]] = []
    for pair in pairs:  # the user's own edges say otherwise of some
        if (one := with_edges(graph, order, [*kept, pair])) is not None:
            kept.append(pair)
            found = one
    return order if found is None else found


def outcome_of(
    engine: Engine, swapped: list[Swapped], config: Config, costs: Costs, order_edges: int
) -> Outcome:
    """Describe a rewrite that was played from a plan."""
    graph, phases = engine.graph, engine.phases
    step = {op.id for op in graph.ops() if op.joins_step or (not op.role and phases.step[op.id])}
    step -= replaced(graph)
    weights = sizes(graph, device=config.device, batch_size=config.batch_size)
    replay = Replay(graph, weights, step, costs)
    planned = [op for op in engine.witness if op in step]
    lowest = floor(graph, weights, costs, planned, replay.persistent_bytes)
    whole = tuple(op for op in engine.witness if op < graph.original_ops)
    return Outcome(engine, swapped, replay.run(planned), lowest, order_edges, whole)


def swapped_in(engine: Engine) -> list[Swapped]:
    """Return the values that are parked, as the rewritten graph shows them."""
    graph, phases = engine.graph, engine.phases
    found: list[Swapped] = []
    for op in graph.ops():
        if op.role != "swap_out":
            continue
        value = op.inputs[0]
        ins = [u.op for u in graph.uses(op.outputs[0]) if graph.op(u.op).role == "swap_in"]
        groups = tuple((w, tuple(graph.uses(graph.op(w).outputs[0]))) for w in ins)
        kept = [phases.level[u.op] for u in graph.uses(value) if u.op < graph.original_ops]
        gone = max(kept, default=phases.level[graph.value(value).op])
        back = min((phases.level[graph.op(w).controls[0]] for w in ins), default=gone)
        if groups:
            found.append(Swapped(value, op.id, groups, gone, back))
    return [*found, *_joined(engine, joins.joined_in(engine), found)]


def _whole(graph: Graph, step: Sequence[OpId], outside: Sequence[OpId]) -> list[OpId]:
    """An order of all operations that keeps the planned order of the step."""
    found = with_edges(graph, [*step, *outside], list(pairwise(step)))
    assert found is not None
    return found
