"""Applies what a planner decided through the rules: copies, what starts them, and who waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from tflms.graph.erase import original
from tflms.graph.ir import Graph, OpId, Use, ValueId
from tflms.planning.auto import Choice, Decision, Problem, SwapIn
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies.lines import Chain
from tflms.strategies.swap import Swapped
from tflms.strategies.waiting import hold

_LOOKED_BACK = 20  # operations of the planned line


def renumbered(decision: Decision, numbers: Mapping[OpId, OpId]) -> Decision:
    """Return a decision about a graph in which some operations were made anew."""

    def served(one: SwapIn) -> SwapIn:
        uses = tuple(use._replace(op=numbers.get(use.op, use.op)) for use in one.uses)
        return dataclasses.replace(one, uses=uses)

    choices = tuple(
        dataclasses.replace(choice, ins=tuple(served(one) for one in choice.ins))
        for choice in decision.choices
    )
    return dataclasses.replace(decision, choices=choices)


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
    wait_for_returns(engine, links, [one for one in done if one.value not in relaxed])
    return done


def wait_for_returns(engine: Engine, links: Chain, swapped: Sequence[Swapped]) -> None:
    """Let what is next wait for copies back, and these for copies out that are under way.

    Those that start at one place run one by one.
    """
    graph = engine.graph
    following = links.following()
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


def _on_host(graph: Graph, value: ValueId, copy: ValueId) -> ValueId | None:
    """Another copy to the host of the same value, made for a concatenation there."""
    made = (graph.op(use.op) for use in graph.uses(value))
    found = (op.outputs[0] for op in made if op.role == "swap_out" and op.outputs[0] != copy)
    return next(found, None)


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
            out = copy if (there := _on_host(graph, choice.value, copy)) is None else there
        if out != copy:
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


def without(setup: Problem, values: Collection[ValueId]) -> Problem:
    """Return the problem with values that stay on the device."""
    gaps = {v: gaps for v, gaps in setup.gaps.items() if v not in values}
    away = {v: at for v, at in setup.away.items() if v not in values}
    return dataclasses.replace(setup, gaps=gaps, away=away)
