"""The strategy ``auto``: a whole-step order, and swaps that keep a memory limit at every moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tflms.config import Config
from tflms.graph.ir import Graph, OpId, Use, ValueId
from tflms.graph.order import Phases, with_edges
from tflms.planning import auto
from tflms.planning.allocator import (
    NEVER_WASTED_NBYTES,
    NEVER_WASTED_ON_EMULATOR_NBYTES,
    overflow,
)
from tflms.planning.auto import Choice, Decision, Gap, Problem
from tflms.planning.buffers import rounded
from tflms.planning.cost import Costs, Sizes, main_device, short_device, sizes, with_inserted
from tflms.planning.floor import Floor, floor, refuse
from tflms.planning.schedule import list_schedule
from tflms.planning.simulate import Replay, Timeline
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies import shapes
from tflms.strategies.gaps import Views, gaps_of
from tflms.strategies.holes import PACES, ROOM_PERCENT, in_the_way, least_limit
from tflms.strategies.lines import Chain, chain, deferred, fix_order
from tflms.strategies.swap import Swapped, paired, selection
from tflms.strategies.waiting import hold

_ATTEMPTS = 60  # for a graph that is small; fewer for larger ones, so that planning takes seconds
_FEWEST_ATTEMPTS = 10
_SMALL_GRAPH = 3000
_SIGNIFICANT = 500  # an operation counts that touches this part of the peak, or more


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
        gate = choice.gate if choice.gate not in links.heads else hold(engine, Use(choice.gate, 0))
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
        v
        for v in selection(graph, config)
        if v < len(phases.activation)
        and phases.activation[v]
        and not any(paired(graph, use, default_kind) for use in graph.uses(v))
    }
    largest = max((weights.nbytes[v] for v in wanted if graph.value(v).op in step), default=1)
    least = max(1, min(ordered.peak_bytes // _SIGNIFICANT, largest // 4))
    links = chain(graph, phases, weights, order, least, default_kind=default_kind)
    edges = fix_order(engine, links)
    host_limit = None if config.host_memory_limit is None else int(config.host_memory_limit)
    kind = short_device(config.device or main_device(graph)).partition(":")[0] or default_kind
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
        apart = deferred(graph, links, planned)
        if apart is not None:  # the executor may leave what the updates do not need for later
            timeline = max(timeline, replay.run(apart), key=lambda t: t.peak_bytes)
        fits = timeline.peak_bytes <= limit
        spill = None
        for pace in PACES if fits else ():
            ran = apart if apart is not None and pace == PACES[-1] else planned
            asked = replay.events(ran, pace)
            room = limit * ROOM_PERCENT // 100
            spill = overflow(asked.persistent, asked.events, room, waste=waste)
            if spill is not None:
                break
        if fits and spill is None:
            return Outcome(engine, swapped, timeline, lowest, edges, tuple(whole))
        tried.append((timeline.peak_bytes, replay, planned))
        more = None
        if spill is not None:
            more = in_the_way(graph, setup, decision, asked, spill, ran)
        graph.rollback(mark)
        if more is not None:
            setup = dataclasses.replace(setup, away=more)
        elif decision.exhausted:
            break
        else:
            step_down = max((timeline.peak_bytes - limit) // 2, limit // 100)
            setup = dataclasses.replace(setup, limit=setup.limit - step_down)
    raise refuse(graph, lowest, limit, least_limit(tried, waste))


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
