"""The strategy ``auto``: a whole-step order, and swaps that keep a memory limit at every moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tflms.config import Config
from tflms.graph import effects
from tflms.graph.erase import original
from tflms.graph.ir import Graph, OpId, Use, ValueId
from tflms.graph.order import Phases, with_edges
from tflms.planning import auto, kernels
from tflms.planning.allocator import (
    NEVER_WASTED_NBYTES,
    NEVER_WASTED_ON_EMULATOR_NBYTES,
    Overflow,
    cheapest_hole,
    least_capacity,
    overflow,
)
from tflms.planning.auto import Choice, Decision, Gap, Problem
from tflms.planning.buffers import rounded
from tflms.planning.cost import Costs, Sizes, main_device, short_device, sizes, with_inserted
from tflms.planning.floor import Floor, floor, refuse
from tflms.planning.schedule import list_schedule
from tflms.planning.simulate import Events, Replay, Timeline
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies import shapes
from tflms.strategies.gaps import Views, gaps_of
from tflms.strategies.swap import Swapped, selection
from tflms.strategies.waiting import hold

_ATTEMPTS = 60  # for a graph that is small; fewer for larger ones, so that planning takes seconds
_FEWEST_ATTEMPTS = 10
_JUDGED = 3  # plans of those that were tried, when a limit is refused
_PACES = (1, 0, 2, 3, 4)  # of copies: a plan fits however fast the link turns out to be
_SMALL_GRAPH = 2000
_SIGNIFICANT = 500  # an operation counts that touches this part of the peak, or more


@dataclass(frozen=True, slots=True)
class Chain:
    """The operations whose order is fixed, and what each of them may be made to wait for.

    Attributes:
        ops: in planned order.
        heads: first operations of what the runtime may fuse; they wait by their input alone.
        needed: per operation id, the targets that need it, as bits.
        feeds: per operation id, the placeholders that it depends on, as bits; what the loss does
            not need depends on all that the loss depends on, for no run has gradients without it.
    """

    ops: tuple[OpId, ...]
    heads: tuple[OpId, ...]
    needed: Sequence[int]
    feeds: Sequence[int]

    def may_wait(self, op: OpId, before: OpId) -> bool:
        """Tell whether waiting drags nothing into a run that would do without it.

        What is fetched in other runs is not known; that they feed what they fed before is.
        """
        return not (self.needed[op] & ~self.needed[before] or self.feeds[before] & ~self.feeds[op])


def chain(graph: Graph, phases: Phases, weights: Sizes, order: Sequence[OpId], least: int) -> Chain:
    """Find the memory-significant operations of a step: those that touch ``least`` bytes."""
    folded = kernels.folded(graph, order)
    touching = [
        op_id
        for op_id in order
        if op_id < graph.original_ops
        and op_id not in folded
        and weights.on_device[op_id]
        and _orderable(graph, phases, op_id)
        and any(weights.nbytes[v] >= least for v in _touched(graph, op_id, folded))
    ]
    ops = [op for op in touching if not _may_be_fused(graph, phases, op)]
    heads = [
        op
        for op in touching
        if _may_be_fused(graph, phases, op) and graph.op(op).type in kernels.HEADS
    ]
    feeds = _feeds(graph, order)
    of_loss = 0
    for op in order:
        if op < graph.original_ops and phases.forward[op]:
            of_loss |= feeds[op]
    for op in order:
        if op < graph.original_ops and not phases.forward[op]:
            feeds[op] |= of_loss
    return Chain(tuple(ops), tuple(heads), phases.needed_by, feeds)


def _may_be_fused(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    """Tell whether Grappler may fuse an operation with its neighbours.

    It does so (MatMul, BiasAdd and Tanh to one kernel) only where no control edge touches them,
    and the fused kernel rounds otherwise: results would change with the plan.
    """
    if kernels.in_sum_of_sums(graph, op_id):
        return True
    kind = short_device(graph.op(op_id).device).partition(":")[0]
    return kind in ("", "CPU", "GPU") and (
        phases.forward[op_id] or kernels.in_fusible_group(graph, op_id)
    )


def _orderable(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    op = graph.op(op_id)
    facts = effects.of(op.type)
    return not (op.frame or phases.guard[op_id] or facts.view or op.type in effects.CONTROL_FLOW)


def _touched(graph: Graph, op_id: OpId, folded: set[OpId]) -> list[ValueId]:
    op = graph.op(op_id)
    read = [v for v in op.inputs if not effects.of(graph.producer(v).type).reads]
    return [*op.outputs, *(v for v in read if graph.value(v).op not in folded)]


def _feeds(graph: Graph, order: Sequence[OpId]) -> list[int]:
    feeds = [0] * graph.size
    count = 0
    for op_id in order:
        op = graph.op(op_id)
        if op.type == "Placeholder" and graph.value(op.outputs[0]).is_tensor:
            feeds[op_id] = 1 << count
            count += 1
        for before in graph.predecessors(op_id):
            feeds[op_id] |= feeds[before]
    return feeds


def fix_order(engine: Engine, links: Chain) -> int:
    """Put control edges between operations in planned order that nothing orders yet.

    Operations that the same targets need and that depend on the same placeholders may all wait for
    each other: they make one line, and each waits for the last of every line that it may wait for.

    Returns:
        how many edges were added.
    """
    added = 0
    last: dict[tuple[int, int], tuple[int, OpId]] = {}
    for place, op in enumerate(links.ops):
        for _, before in sorted(last.values(), reverse=True):
            if links.may_wait(op, before) and not engine.reach.precedes(before, op):
                outcome = engine.apply(Application("order", {"a": before, "b": op}))
                added += isinstance(outcome, Applied)
        last[(links.needed[op], links.feeds[op])] = (place, op)
    return added


def problem(
    graph: Graph,
    weights: Sizes,
    costs: Costs,
    timeline: Timeline,
    links: Chain,
    wanted: set[ValueId],
    *,
    limit: int,
    host_limit: int | None,
) -> Problem:
    """Set up what the planner decides about, from the timeline of the ordered graph."""
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
            if value in wanted:
                held = max(place[op_id], views.last_use_of_others(value, place))
                nbytes = rounded(weights.nbytes[value])
                if found := gaps_of(graph, nbytes, place, gates, value, held):
                    gaps[value] = found
    return Problem(
        order, np.asarray(timeline.resident, np.int64), np.cumsum(seconds) - seconds, seconds,
        in_chain, gates, gaps, costs, limit, host_limit,
    )  # fmt: skip


def apply(engine: Engine, links: Chain, decision: Decision) -> list[Swapped]:
    """Apply what was decided through the rules; what a rule refuses stays on the device."""
    done: list[Swapped] = []
    for choice in decision.choices:
        swapped = _apply_choice(engine, links, choice)
        if swapped is not None:
            done.append(swapped)
    return done


def _apply_choice(engine: Engine, links: Chain, choice: Choice) -> Swapped | None:
    graph, phases = engine.graph, engine.phases
    mark = len(graph.journal)
    out: ValueId | None = None
    groups: list[tuple[OpId, tuple[Use, ...]]] = []
    for swap_in in choice.ins:
        bindings = {"v": choice.value, "late": swap_in.uses, "anchor": swap_in.anchor}
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
        gate = choice.gate if choice.gate not in links.heads else hold(engine, choice.gate)
        if gate is not None:
            engine.apply(Application("order", {"a": source, "b": gate}))
    gone = max((phases.level[u.op] for u in graph.uses(choice.value) if u.op < graph.original_ops),
               default=phases.level[graph.value(choice.value).op])  # fmt: skip
    back = min(phases.level[graph.op(w).controls[0]] for w, _ in groups)
    return Swapped(choice.value, source, tuple(groups), gone, back)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the strategy did.

    Attributes:
        engine: with all rule applications in its log.
        swapped: the values that were parked.
        timeline: prediction for the rewritten graph in its planned order.
        floor: what no plan can go below.
        order_edges: control edges that fix the order.
        packed: whether the allocator model finds room in a device of that limit (plus 3 %).
        order: the planned order of all of the user's operations, before anything was inserted.
    """

    engine: Engine
    swapped: list[Swapped]
    timeline: Timeline
    floor: Floor
    order_edges: int
    order: tuple[OpId, ...]
    packed: bool = True


def run(
    graph: Graph,
    phases: Phases,
    config: Config,
    costs: Costs,
    limit: int,
) -> Outcome:
    """Order a step and park values so that it keeps a memory limit.

    Raises:
        InfeasibleError: the limit is below the floor, or no choice of swaps meets it.
    """
    step = {op.id for op in graph.ops() if phases.step[op.id]}
    weights = sizes(graph, device=config.device, batch_size=config.batch_size)
    order = list_schedule(graph, weights, step)
    outside = [op for op in phases.order if op not in step]
    whole = _whole(graph, order, outside)
    engine = Engine(graph, phases, host_device=config.host_device, order=whole)
    shapes.run(engine)
    step |= {op.id for op in graph.ops() if op.role}
    weights = sizes(graph, device=config.device, batch_size=config.batch_size)
    order = [op for op in engine.witness if op in step]
    replay = Replay(graph, weights, step, costs)
    ordered = replay.run(order)
    lowest = floor(graph, weights, costs, order, replay.persistent_bytes)
    if limit < lowest.nbytes:
        raise refuse(graph, lowest, limit)
    wanted = {
        v for v in selection(graph, config) if v < len(phases.activation) and phases.activation[v]
    }
    largest = max((weights.nbytes[v] for v in wanted if graph.value(v).op in step), default=1)
    least = max(1, min(ordered.peak_bytes // _SIGNIFICANT, largest // 4))
    links = chain(graph, phases, weights, order, least)
    edges = fix_order(engine, links)
    host_limit = None if config.host_memory_limit is None else int(config.host_memory_limit)
    kind = short_device(config.device or main_device(graph)).partition(":")[0]
    waste = NEVER_WASTED_ON_EMULATOR_NBYTES if kind == "EMU" else NEVER_WASTED_NBYTES
    setup = problem(graph, weights, costs, ordered, links, wanted, limit=limit,
                    host_limit=host_limit)  # fmt: skip
    attempts = max(_FEWEST_ATTEMPTS, _ATTEMPTS * _SMALL_GRAPH // max(len(order), _SMALL_GRAPH))
    mark = len(graph.journal)
    tried: list[tuple[int, Replay, list[OpId]]] = []
    for _ in range(attempts):
        decision = auto.decide(setup)
        swapped = apply(engine, links, decision)
        inserted = step | {op.id for op in graph.ops() if op.role}
        replay = Replay(graph, with_inserted(graph, weights), inserted, costs, like=replay)
        planned = [o for o in engine.witness if o in inserted]
        timeline = replay.run(planned)
        fits = timeline.peak_bytes <= limit
        spill = None
        for pace in _PACES if fits else ():
            asked = replay.events(planned, pace)
            spill = overflow(asked.persistent, asked.events, limit * 103 // 100, waste=waste)
            if spill is not None:
                break
        if fits and spill is None:
            return Outcome(engine, swapped, timeline, lowest, edges, tuple(whole))
        tried.append((timeline.peak_bytes, replay, planned))
        more = None
        if spill is not None:
            more = _in_the_way(graph, setup, decision, asked, spill, planned)
        graph.rollback(mark)
        if more is not None:
            setup = dataclasses.replace(setup, away=more)
        elif decision.exhausted:
            break
        else:
            step_down = max((timeline.peak_bytes - limit) // 2, limit // 100)
            setup = dataclasses.replace(setup, limit=setup.limit - step_down)
    raise refuse(graph, lowest, limit, _least(tried, waste))


def _least(tried: Sequence[tuple[int, Replay, list[OpId]]], waste: int) -> int:
    """The smallest limit that one of the plans with the lowest peaks would keep."""
    best: int | None = None
    for peak, replay, planned in sorted(tried, key=lambda plan: plan[0])[:_JUDGED]:
        found = peak
        for pace in _PACES:
            asked = replay.events(planned, pace)
            least = least_capacity(asked.persistent, asked.events, found, waste=waste)
            found = max(found, least * 100 // 103 + 1)
            if best is not None and found >= best:
                break
        best = found if best is None else min(found, best)
    assert best is not None
    return best


def _in_the_way(
    graph: Graph,
    setup: Problem,
    decision: Decision,
    asked: Events,
    spill: Overflow,
    planned: Sequence[OpId],
) -> dict[ValueId, tuple[int, ...]] | None:
    """Ask for the values to be gone whose buffers leave no hole for what found none.

    Returns:
        per value, places at which it must be away; None where nothing can be done.
    """
    at = asked.places[spill.event]
    place = _place_of(setup, planned, at)

    def value_in(buffer: int) -> ValueId | None:
        value = asked.tenant(buffer, at)
        if value is not None and graph.producer(value).role == "swap_in":
            value = original(graph, value)
        return value

    def price(buffer: int) -> float | None:
        value = value_in(buffer)
        if value is None or place in setup.away.get(value, ()):
            return None
        gap = setup.may_be_away(value, place)
        return None if gap is None else float(gap.nbytes)

    def floating(buffer: int) -> bool:
        return buffer in asked.tenants

    found = cheapest_hole(spill, price, floating)
    if not found:
        return None
    values = [(buffer, value_in(buffer)) for buffer in found]
    came = {b: asked.tenants[b][0][0] for b, v in values if price(b) is None}
    moved = [v for b, v in values if b not in came and v is not None]
    if not moved:
        return None
    earliest = min((_place_of(setup, planned, at) for at in came.values()), default=place)
    away: dict[ValueId, tuple[int, ...]] = {}
    for value, gone, back in decision.stays:  # what is parked stays so: less is held, never more
        away[value] = (*away.get(value, ()), gone, back)
    for value, places in setup.away.items():
        away[value] = (*away.get(value, ()), *places)
    for value in moved:
        away[value] = (*away.get(value, ()), place)
        if earliest < place and setup.may_be_away(value, earliest):
            away[value] += (earliest,)
    return {value: tuple(sorted(set(at))) for value, at in away.items()}


def _place_of(setup: Problem, planned: Sequence[OpId], at: int) -> int:
    """The place in the order without swaps that belongs to one in the order with them."""
    before = set(planned[:at])
    return min(sum(op in before for op in setup.order), len(setup.order) - 1)


def outcome_of(
    engine: Engine, swapped: list[Swapped], config: Config, costs: Costs, order_edges: int
) -> Outcome:
    """Describe a rewrite that was played from a plan."""
    graph, phases = engine.graph, engine.phases
    step = {op.id for op in graph.ops() if op.role or phases.step[op.id]}
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
        found.append(Swapped(value, op.id, groups, gone, back))
    return found


def _whole(graph: Graph, step: Sequence[OpId], outside: Sequence[OpId]) -> list[OpId]:
    """An order of all operations that keeps the planned order of the step."""
    found = with_edges(graph, [*step, *outside], list(pairwise(step)))
    assert found is not None
    return found
