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
from tflms.errors import GraphError
from tflms.graph import effects, variables
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases

MOST_STAGES = 340  # the solver takes seconds for so many
_ROOT, _END = OpId(-1), OpId(-2)
# Operations whose gradient reads their output: its last late reader belongs to their own stage.
_GRADIENT_READS_OUTPUT_NAMES = """
    Relu Relu6 Elu Selu Tanh Sigmoid Softmax LogSoftmax Exp Sqrt Rsqrt Reciprocal Inv MaxPool
    MaxPoolV2 MaxPool3D Max Min Prod SegmentMax SegmentMin Cholesky MatrixInverse
"""
_GRADIENT_READS_OUTPUT = frozenset(_GRADIENT_READS_OUTPUT_NAMES.split())


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
    base = 0 if _reads_data(graph, phases, spine, index) else spine.lowest - 1
    index = {op: i for op, i in index.items() if i > base}
    index |= _derived(graph, phases, late, spine, index, points)
    chosen, turns = _turns(graph, phases, points, index, spine, base)
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


def _reads_data(graph: Graph, phases: Phases, spine: Spine, index: Mapping[OpId, int]) -> bool:
    """Tell whether the last gradients read the data: then the first layer is trained."""
    end = len(spine.ops) - 1
    return any(
        phases.activation[v]
        and phases.forward[graph.value(v).op]
        and graph.value(v).op not in index
        for op in sorted(spine.gradients)
        if spine.place.get(op) == end
        for v in graph.op(op).inputs
    )


def _turns(
    graph: Graph,
    phases: Phases,
    points: Sequence[OpId],
    index: Mapping[OpId, int],
    spine: Spine,
    base: int,
) -> tuple[list[int], list[int]]:
    """Choose articulation points whose total gradient is on the spine; both by number."""
    count = len(points)
    latest = [-1] * (count + 2)  # per interval: the last place on the spine that a reader needs
    soonest = [len(spine.ops)] * (count + 2)  # and the first behind which all of them come
    at_point = [-1] * (count + 2)
    last_on = [-1] * (count + 2)  # of the point's own value: the deepest reader on the spine
    read = [False] * (count + 2)
    own = {op: number for number, op in enumerate(points, start=1)}
    soonest_point = list(soonest)
    for op_id, number in index.items():
        for value in graph.op(op_id).outputs:
            for use in graph.uses(value):
                if effects.takes_shape(graph.op(use.op).type):
                    continue
                read[number] |= use.op in index and not phases.forward[use.op] and op_id in own
                held, needs = spine.before(use.op), spine.place.get(use.op)
                if held is None or needs is None:
                    continue
                if op_id in own:
                    read[number] = True
                    at_point[number] = max(at_point[number], needs)
                    soonest_point[number] = min(soonest_point[number], held)
                    if spine.holds(use.op):
                        last_on[number] = max(last_on[number], held)
                else:
                    latest[number] = max(latest[number], needs)
                    soonest[number] = min(soonest[number], held)
    first: list[int] = [len(spine.ops)]  # soonest of all that lies below a point
    for number in range(1, count + 1):
        before = first[-1] if number == 1 else min(first[-1], soonest_point[number - 1])
        first.append(min(before, soonest[number]))
    chosen: list[int] = []
    turns: list[int] = []
    signals = [place for place, op in enumerate(spine.ops) if _signals(graph, phases, op)]
    beyond, previous = latest[count + 1], -1
    for number in range(count, base, -1):
        op = graph.op(points[number - 1])
        reads_output = op.type in _GRADIENT_READS_OUTPUT and last_on[number] >= 0
        low = max(previous + 1, beyond, -1 if reads_output else at_point[number])
        high = min(first[number], last_on[number] if reads_output else len(spine.ops))
        output = _single_output(graph, phases, points[number - 1], index)
        if output is not None and number < count and read[number] and low <= high:
            high = min(high, len(spine.ops) - 1)
            turn = _pick(graph, spine, output, low, high, reads_output)
            if turn is not None:  # rather a little later, where something can wait for it
                turn = next((place for place in signals if turn <= place <= high), turn)
            if turn is not None and signals and signals[0] <= turn:
                chosen.append(number)
                turns.append(turn)
                previous = turn
        beyond = max(beyond, latest[number], at_point[number])
    return chosen[::-1], turns[::-1]


def _signals(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    """Tell whether others may wait for a gradient, without a change of any number."""
    op = graph.op(op_id)
    readers = (graph.op(u.op).type for v in op.outputs for u in graph.uses(v))
    if op.frame or phases.guard[op_id] or not effects.signals(op.type, readers):
        return False
    return any(phases.activation[v] and graph.value(v).shape != () for v in op.outputs)


def _single_output(
    graph: Graph, phases: Phases, op: OpId, index: Mapping[OpId, int]
) -> ValueId | None:
    """The only value of an operation that the forward phase goes on with, a plain real tensor."""
    readers = [
        v
        for v in graph.op(op).outputs
        if any(use.op in index and phases.forward[use.op] for use in graph.uses(v))
    ]
    if len(readers) != 1:
        return None
    v = graph.value(readers[0])
    real = v.dtype in ("f32", "f16", "bf16", "f64") and v.shape != ()
    return readers[0] if real else None


def _pick(
    graph: Graph, spine: Spine, value: ValueId, low: int, high: int, last: bool
) -> int | None:
    """The place on the spine where the gradient of a value is most likely complete."""
    v = graph.value(value)
    places = range(high, low - 1, -1) if last else range(low, high + 1)
    for place in places:
        for found in map(graph.value, graph.op(spine.ops[place]).outputs):
            if found.dtype == v.dtype and _alike(found.shape, v.shape):
                return place
    return low if low <= high else None


def _alike(a: tuple[int | None, ...] | None, b: tuple[int | None, ...] | None) -> bool:
    if a is None or b is None:
        return True
    return len(a) == len(b) and all(m is None or n is None or m == n for m, n in zip(a, b))  # noqa: B905


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
            _must(_single_output(graph, phases, points[number - 1], index)) for number in chosen
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
    return next(op for op in reversed(spine.ops[: turn + 1]) if _signals(graph, phases, op))


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
