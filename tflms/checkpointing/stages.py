"""Cuts a training step into the stages of a chain.

The forward phase is cut at articulation points: operations that every way from the data to the loss
leads through (dominators). The backward phase is cut at the total gradients of these: operations
that every way from the loss to the gradients of all earlier stages leads through. No name of an
operation is looked at.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from tflms.checkpointing.gradients import Spine, find_spine
from tflms.checkpointing.turns import find_turns, single_output, usable
from tflms.errors import GraphError
from tflms.graph import effects, variables
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases

MOST_STAGES = 340  # the solver takes seconds for so many
_ROOT, _END = OpId(-1), OpId(-2)


@dataclass(frozen=True, slots=True)
class Cut:
    """A training step as the stages 1..n of a chain.

    Attributes:
        graph: the step's graph; ``phases`` are its phases.
        stage: per forward operation its stage, and so for what late operations compute from
            forward values alone, as the derivative of a square.
        forward: per stage (entry l - 1) these operations, in order.
        outputs: the values a^1 .. a^(n-1).
        inputs: values that stages read and that belong to none: the data, masks, frozen layers.
        repeatable: operations that may run again; the others keep their results.
        spine: what every gradient passes, and where each late reader hangs on it.
        turns: where on the spine d^0 .. d^n are complete; -1 for d^n.
        anchors: per d^1 .. d^(n-1), the gradient that what runs behind it waits for.
        backward: per stage its operations of the backward phase, in order.
    """

    graph: Graph
    phases: Phases
    stage: Mapping[OpId, int]
    forward: tuple[tuple[OpId, ...], ...]
    outputs: tuple[ValueId, ...]
    inputs: tuple[ValueId, ...]
    repeatable: frozenset[OpId]
    spine: Spine
    turns: tuple[int, ...]
    anchors: tuple[OpId, ...]
    backward: tuple[tuple[OpId, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages n; the last one ends in the loss."""
        return len(self.forward)

    def backward_stage(self, op: OpId) -> int | None:
        """Return the stage whose backward an operation belongs to, if it is a gradient."""
        held = self.spine.before(op)
        if held is None:
            return None
        return 1 + sum(turn > held for turn in self.turns[1:-1])

    def late_uses(self, value: ValueId) -> list[tuple[OpId, int, int]]:
        """Return the gradients that read a value: operation, input slot, stage."""
        found = []
        for use in self.graph.uses(value):
            if use.op < self.graph.original_ops:
                stage = self.backward_stage(use.op)
                if stage is not None and not effects.takes_shape(self.graph.op(use.op).type):
                    found.append((use.op, use.slot, stage))
        return found


def cut(graph: Graph, phases: Phases, *, most_stages: int = MOST_STAGES) -> Cut:
    """Cut a training step into stages.

    Args:
        graph: the graph as it was read.
        phases: its phases.
        most_stages: stages are joined until there are no more than so many.

    Raises:
        GraphError: there is no operation that all of the forward phase, or all of the backward
            phase, leads through: nothing could be recomputed stage by stage.
    """
    path = _path(graph, phases)
    points, index = _articulation(graph, path)
    late = [o for o in phases.order if phases.step[o] and not phases.forward[o]]
    spine = find_spine(graph, late, index)
    base = _frozen(graph, phases, spine, index, points)
    index = {op: i for op, i in index.items() if i > base}
    index |= _derived(graph, phases, late, spine, index, points)
    chosen, turns = find_turns(graph, phases, points, index, spine, base)
    if not chosen:
        raise GraphError(
            "this step is no chain: no value that the backward phase reads again has all of the "
            "forward phase on its two sides; strategy='auto' parks values of any graph"
        )
    chosen, turns = _fewer(chosen, turns, most_stages)
    return _assemble(graph, phases, spine, points, index, chosen, turns)


def _path(graph: Graph, phases: Phases) -> list[OpId]:
    """Forward operations that compute from data and variables; what is shared is left out."""
    learned: set[OpId] = set()
    found: list[OpId] = []
    for op_id in phases.order:
        if not (phases.step[op_id] and phases.forward[op_id]):
            continue
        op = graph.op(op_id)
        facts = effects.of(op.type)
        reads = bool(facts.reads) or any(graph.value(v).is_ref for v in op.inputs)
        reads |= op.type in effects.FUNCTIONAL and variables.touches(graph, op_id)
        if reads or any(graph.value(v).op in learned for v in op.inputs):
            learned.add(op_id)
            if any(phases.activation[v] and graph.value(v).is_tensor for v in op.outputs):
                found.append(op_id)
    return found


def _articulation(graph: Graph, path: Sequence[OpId]) -> tuple[list[OpId], dict[OpId, int]]:
    """Operations that all ways lead through (the first is no. 1), and each one's interval.

    An articulation point has its own number; what lies between two has the later one's.
    """
    on_path = set(path)
    flow = nx.DiGraph()
    ends = set(path)
    for op in path:
        before = {graph.value(v).op for v in graph.op(op).inputs} & on_path
        ends -= before
        flow.add_edges_from((b, op) for b in sorted(before) or [_ROOT])
    flow.add_edges_from((op, _END) for op in sorted(ends))
    if not path:
        raise GraphError("no operation of the forward phase depends on data and on variables")
    dominator = nx.immediate_dominators(flow, _ROOT)
    points: list[OpId] = []
    here = dominator[_END]
    while here != _ROOT:
        points.append(here)
        here = dominator[here]
    points.reverse()
    passed = {_ROOT: 0, **{op: number for number, op in enumerate(points, start=1)}}
    index: dict[OpId, int] = {}
    for op in path:  # in order: the dominator comes first
        if op in passed:
            index[op] = passed[op]
        else:
            passed[op] = passed[dominator[op]]
            index[op] = passed[op] + 1
    return points, index


def _derived(
    graph: Graph,
    phases: Phases,
    late: Sequence[OpId],
    spine: Spine,
    index: Mapping[OpId, int],
    points: Sequence[OpId],
) -> dict[OpId, int]:
    """Late operations that compute from forward values alone, with the interval that they join."""
    found: dict[OpId, int] = {}
    own = set(points)
    for op_id in late:
        op = graph.op(op_id)
        if op_id in spine.gradients or effects.takes_shape(op.type):
            continue
        if not any(phases.activation[v] for v in op.outputs):
            continue
        possible: set[int] | None = None
        for value in op.inputs:
            source = graph.value(value).op
            if source in found:
                here = {found[source]}
            elif source in index:
                here = {index[source]} | ({index[source] + 1} if source in own else set())
            else:
                continue
            possible = here if possible is None else possible & here
        if possible:
            found[op_id] = max(possible)
    read: set[OpId] = set()
    for op_id in reversed(list(found)):
        readers = {use.op for v in graph.op(op_id).outputs for use in graph.uses(v)}
        if readers & read or not readers.isdisjoint(spine.gradients):
            read.add(op_id)
    return {op: number for op, number in found.items() if op in read}


def _frozen(
    graph: Graph,
    phases: Phases,
    spine: Spine,
    index: Mapping[OpId, int],
    points: Sequence[OpId],
) -> int:
    """Return the number of the point up to which layers are frozen: its value is the data then.

    Frozen layers have no gradients, so the first value that gradients read is their result, unless
    the last gradients read the data itself.
    """
    point = points[spine.lowest - 1] if spine.lowest <= len(points) else None
    readers = {
        op
        for op, number in index.items()
        if number == spine.lowest
        for value in graph.op(op).outputs
        if any(use.op in spine.place for use in graph.uses(value))
    }
    trained = readers != {point} or _reads_data(graph, phases, spine, index)
    return 0 if trained else spine.lowest


def _reads_data(graph: Graph, phases: Phases, spine: Spine, index: Mapping[OpId, int]) -> bool:
    """Tell whether the last gradients read the data."""
    end = len(spine.ops) - 1
    return any(
        phases.activation[v]
        and phases.forward[graph.value(v).op]
        and graph.value(v).op not in index
        for op in sorted(spine.gradients)
        if spine.place.get(op) == end
        for v in graph.op(op).inputs
    )


def _fewer(chosen: list[int], turns: list[int], most: int) -> tuple[list[int], list[int]]:
    """Keep evenly spaced cuts where there are too many."""
    if len(chosen) < most:
        return chosen, turns
    kept = sorted({round(i * (len(chosen) - 1) / (most - 2)) for i in range(most - 1)})
    return [chosen[i] for i in kept], [turns[i] for i in kept]


def _assemble(
    graph: Graph,
    phases: Phases,
    spine: Spine,
    points: Sequence[OpId],
    index: Mapping[OpId, int],
    chosen: Sequence[int],
    turns: Sequence[int],
) -> Cut:
    stages = len(chosen) + 1
    stage = {op: 1 + bisect_left(chosen, number) for op, number in index.items()}
    forward: list[list[OpId]] = [[] for _ in range(stages)]
    for op in phases.order:
        if op in stage:
            forward[stage[op] - 1].append(op)
    found = Cut(
        graph=graph,
        phases=phases,
        stage=stage,
        forward=tuple(map(tuple, forward)),
        outputs=tuple(
            _must(single_output(graph, phases, points[number - 1], index)) for number in chosen
        ),
        inputs=tuple(_inputs(graph, phases, stage)),
        repeatable=frozenset(op for op in stage if _repeatable(graph, phases, op)),
        spine=spine,
        turns=(len(spine.ops), *turns, -1),
        anchors=tuple(_anchor(graph, phases, spine, turn) for turn in turns),
        backward=((),) * stages,
    )
    backward: list[list[OpId]] = [[] for _ in range(stages)]
    for op in phases.order:
        number = found.backward_stage(op) if op in spine.gradients else None
        if number is not None:
            backward[number - 1].append(op)
    return dataclasses.replace(found, backward=tuple(map(tuple, backward)))


def _anchor(graph: Graph, phases: Phases, spine: Spine, turn: int) -> OpId:
    """The last gradient up to a place on the spine that others may wait for."""
    return next(op for op in reversed(spine.ops[: turn + 1]) if usable(graph, phases, op))


def _must(value: ValueId | None) -> ValueId:
    assert value is not None  # only such points were chosen
    return value


def _inputs(graph: Graph, phases: Phases, stage: Mapping[OpId, int]) -> Iterable[ValueId]:
    read = (v for op in sorted(stage) for v in graph.op(op).inputs)
    outside = (v for v in read if graph.value(v).op not in stage and graph.value(v).is_tensor)
    return sorted({v for v in outside if phases.activation[v]})


def _repeatable(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    """Tell whether an operation may run again: as the rule ``recompute`` requires."""
    op = graph.op(op_id)
    facts = effects.of(op.type)
    alone = facts.known and facts.pure and not op.stateful and not (facts.reads or facts.writes)
    return alone and not (variables.touches(graph, op_id) or op.frame or phases.guard[op_id])
