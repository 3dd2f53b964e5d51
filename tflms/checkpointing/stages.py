"""Cuts a training step into the stages of a chain.

The forward phase is laid out in a row and cut where little crosses: at articulation points, and in
heavy stages where several values do. The backward phase is laid out likewise; what belongs to which
stage follows from the values that it reads. No name of an operation is looked at.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tflms.checkpointing import crossing, granularity, rounding
from tflms.checkpointing.gradients import Spine, find_spine
from tflms.checkpointing.turns import Reads, anchor_at, find_turns, late_reads
from tflms.errors import GraphError
from tflms.graph import effects, variables
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases
from tflms.planning.cost import Sizes, sizes

MOST_STAGES = 340  # the solver takes seconds for so many


@dataclass(frozen=True, slots=True)
class Cut:
    """A training step as the stages 1..n of a chain.

    Attributes:
        graph: the step's graph; ``phases`` are its phases.
        stage: per forward operation its stage, and so for what late operations compute from
            forward values alone, as the derivative of a square.
        forward: per stage (entry l - 1) these operations, in order.
        outputs: a^1 .. a^(n-1), each the values that a stage makes and the next one reads.
        kept: values that stages further on read as well, as over long skips, and what may run only
            once: they stay from when they are first made to their last use.
        inputs: values that stages read and that belong to none: the data, masks, frozen layers.
        repeatable: operations that may run again; the others keep their results.
        spine: the row of what reads the forward phase on the way back.
        turns: where on the spine d^0 .. d^n are complete; -1 for d^n.
        anchors: per d^1 .. d^(n-1), the gradient that what runs behind it waits for.
        gradients: d^0 .. d^n, each the values that the backward of later stages hands to that of
            earlier ones; of a long skip too, wherever it spans.
        backward: per stage its operations of the backward phase, in order.
    """

    graph: Graph
    phases: Phases
    stage: Mapping[OpId, int]
    forward: tuple[tuple[OpId, ...], ...]
    outputs: tuple[tuple[ValueId, ...], ...]
    kept: frozenset[ValueId]
    inputs: tuple[ValueId, ...]
    repeatable: frozenset[OpId]
    spine: Spine
    turns: tuple[int, ...]
    anchors: tuple[OpId, ...]
    gradients: tuple[tuple[ValueId, ...], ...]
    backward: tuple[tuple[OpId, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages n; the last one ends in the loss."""
        return len(self.forward)

    def again(self, value: ValueId) -> bool:
        """Tell whether a value of some stage is made again where its stage runs again."""
        return self.graph.value(value).op in self.repeatable and value not in self.kept

    @property
    def carried(self) -> tuple[ValueId, ...]:
        """Values that could be made again and are kept, as they cross several stages."""
        made = ((v, self.graph.value(v).op) for v in sorted(self.kept))
        return tuple(v for v, op in made if op in self.repeatable)

    def backward_stage(self, op: OpId) -> int | None:
        """Return the stage whose backward an operation belongs to, if it is a gradient."""
        held = self.spine.before(op)
        if held is None:
            return None
        behind = bisect_left(self.turns, -held, key=lambda turn: -turn)  # turns that come later
        return max(1, min(behind, self.stages))

    def late_uses(self, value: ValueId) -> list[tuple[OpId, int, int]]:
        """Return the gradients that read a value: operation, input slot, stage."""
        found = []
        for use in self.graph.uses(value):
            if use.op < self.graph.original_ops:
                stage = self.backward_stage(use.op)
                if stage is not None and not effects.takes_shape(self.graph.op(use.op).type):
                    found.append((use.op, use.slot, stage))
        return found


def cut(
    graph: Graph,
    phases: Phases,
    *,
    weights: Sizes | None = None,
    most_stages: int = MOST_STAGES,
) -> Cut:
    """Cut a training step into stages, the finest way of ``cuts``.

    Raises:
        GraphError: as ``cuts``.
    """
    return cuts(graph, phases, weights=weights, most_stages=most_stages)[-1]


def cuts(
    graph: Graph,
    phases: Phases,
    *,
    weights: Sizes | None = None,
    most_stages: int = MOST_STAGES,
) -> list[Cut]:
    """Return the ways to cut a training step into stages: a coarse one, a finer one, or both.

    The coarse one is cut at articulation points, which costs nothing. The finer one is there where
    a heavy stage can be cut into lighter ones by keeping what crosses: long skips, for example.

    Args:
        graph: the graph as it was read.
        phases: its phases.
        weights: bytes of its values; None weighs them.
        most_stages: stages are joined until there are no more than so many.

    Raises:
        GraphError: nothing could be recomputed stage by stage; the message says why.
    """
    return _Cutter(graph, phases, weights or sizes(graph)).run(most_stages)


class _Cutter:
    def __init__(self, graph: Graph, phases: Phases, weights: Sizes) -> None:
        self.graph, self.phases, self.weights = graph, phases, weights
        path = crossing.path(graph, phases)
        if not path:
            raise GraphError(
                "no operation of the forward phase depends on data and on variables: there is "
                "nothing to recompute; pass the tensor that the gradients were taken of as loss="
            )
        number = {op: place for place, op in enumerate(path, start=1)}
        late = [o for o in phases.order if phases.step[o] and not phases.forward[o]]
        gradients = find_spine(graph, phases, number, weights).gradients
        number |= crossing.derived(graph, phases, late, gradients, number)
        self.spine = find_spine(graph, phases, number, weights)
        self.line = crossing.line(graph, path, number)
        self.reads = late_reads(graph, self.line, self.spine, weights)
        self.base = self._frozen()

    def run(self, most_stages: int) -> list[Cut]:
        graph, phases, line, reads = self.graph, self.phases, self.line, self.reads
        coarse = granularity.articulations(graph, phases, line, reads, base=self.base)
        finer = granularity.finer(
            graph, phases, line, reads, self.weights, coarse, base=self.base, most=most_stages - 1
        )
        found: list[Cut] = []
        for numbers in (coarse, finer or []):
            chosen, turns = find_turns(graph, phases, line, self.spine, reads, numbers)
            if chosen and not (found and len(chosen) <= len(found[0].outputs)):
                found.append(self._assemble(*_fewer(chosen, turns, most_stages)))
        if not found:
            raise GraphError(self._why(coarse, finer))
        return found

    def _frozen(self) -> int:
        """Return the number up to which layers are frozen: what crosses there is the data.

        Frozen layers have no gradients, so the first value that gradients read is their result,
        unless the last gradients read the data itself.
        """
        lowest = self.spine.lowest
        if len(self.line.across[lowest] or ()) != 1 or self._reads_data():
            return 0
        return lowest

    def _reads_data(self) -> bool:
        """Tell whether what comes behind the first reader of the first layer reads the data."""
        graph, spine, number = self.graph, self.spine, self.line.number
        made = self.line.ops[spine.lowest - 1]
        readers = (use.op for v in graph.op(made).outputs for use in graph.uses(v))
        start = min((spine.place[op] for op in readers if op in spine.place), default=0)
        return any(
            self.phases.activation[v]
            and self.phases.forward[graph.value(v).op]
            and graph.value(v).op not in number
            for op in sorted(spine.gradients)
            if spine.place.get(op, -1) >= start
            for v in graph.op(op).inputs
        )

    def _why(self, coarse: Sequence[int], finer: Sequence[int] | None) -> str:
        """Say what keeps a step from being a chain."""
        graph, line = self.graph, self.line
        advice = "strategy='auto' parks values of any graph"
        if coarse or finer:
            place = graph.op(self.spine.ops[-1]).name
            return (
                "this step is no chain: no gradient that TensorFlow leaves as it is lies between "
                f"the stages for recomputation to wait for (the last one is {place!r}); {advice}"
            )
        narrow = min(
            (n for n in range(self.base + 1, len(line.ops)) if line.across[n]),
            key=lambda n: sum(self.weights.nbytes[v] for v in line.across[n] or ()),
            default=None,
        )
        if narrow is None:
            return (
                "this step is no chain: the gradients read too little of what the forward phase "
                f"makes to cut it ({len(line.ops)} operations from {graph.op(line.ops[0]).name!r} "
                f"on depend on data and variables); {advice}"
            )
        names = ", ".join(repr(graph.value_name(v)) for v in (line.across[narrow] or ())[:4])
        return (
            "this step is no chain: no value that the backward phase reads again has all of the "
            "forward phase on its two sides, and to keep what crosses would save nothing; least "
            f"crosses behind {graph.op(line.ops[narrow - 1]).name!r}: {names}; {advice}"
        )

    def _assemble(self, chosen: Sequence[int], turns: Sequence[int]) -> Cut:
        graph, phases, spine = self.graph, self.phases, self.spine
        stages = len(chosen) + 1
        stage = {
            op: 1 + bisect_left(chosen, at) for op, at in self.line.number.items() if at > self.base
        }
        forward: list[list[OpId]] = [[] for _ in range(stages)]
        for op in (*self.line.ops, *(o for o in phases.order if not phases.forward[o])):
            if op in stage:
                forward[stage[op] - 1].append(op)
        repeatable = frozenset(op for op in stage if _repeatable(graph, phases, op))
        once, operands = rounding.held(graph, self.line.ops)
        repeatable -= once
        outputs, kept = _boundaries(graph, stage, stages, repeatable, self.reads, operands)
        found = Cut(
            graph=graph,
            phases=phases,
            stage=stage,
            forward=tuple(map(tuple, forward)),
            outputs=outputs,
            kept=kept,
            inputs=tuple(_inputs(graph, phases, stage)),
            repeatable=repeatable,
            spine=spine,
            turns=(len(spine.ops), *turns, -1),
            anchors=tuple(anchor_at(graph, phases, spine, turn) for turn in turns),
            gradients=_handed_back(graph, spine, (len(spine.ops), *turns, -1)),
            backward=((),) * stages,
        )
        backward: list[list[OpId]] = [[] for _ in range(stages)]
        for op in phases.order:
            number = found.backward_stage(op) if op in spine.gradients else None
            if number is not None:
                backward[number - 1].append(op)
        return dataclasses.replace(found, backward=tuple(map(tuple, backward)))


def _boundaries(
    graph: Graph,
    stage: Mapping[OpId, int],
    stages: int,
    repeatable: frozenset[OpId],
    reads: Reads,
    operands: set[ValueId],
) -> tuple[tuple[tuple[ValueId, ...], ...], frozenset[ValueId]]:
    """What each stage hands to the next one alone, and what is kept, operands of sums too."""
    outputs: list[list[ValueId]] = [[] for _ in range(stages - 1)]
    kept: set[ValueId] = set()
    for op_id, made in stage.items():
        for value in graph.op(op_id).outputs:
            if not graph.value(value).is_tensor:
                continue
            readers = [
                stage[use.op]
                for use in graph.uses(value)
                if use.op in stage and not effects.takes_shape(graph.op(use.op).type)
            ]
            last = max(readers, default=made)
            used = last > made or value in reads.last
            stays = value in operands or value in reads.pinned
            if stays or last > made + 1 or (used and op_id not in repeatable):
                kept.add(value)
            elif last == made + 1:
                outputs[made - 1].append(value)
    return tuple(map(tuple, outputs)), frozenset(kept)


def _handed_back(
    graph: Graph, spine: Spine, turns: Sequence[int]
) -> tuple[tuple[ValueId, ...], ...]:
    """Per turn, the values of the row that are made up to it and read behind it."""
    found: list[list[ValueId]] = [[] for _ in turns]
    for value, last in spine.last.items():
        made = spine.place[graph.value(value).op]
        for stage in range(bisect_left(turns, 1 - last, key=lambda turn: -turn), len(turns)):
            if turns[stage] < made:
                break
            found[stage].append(value)
    return tuple(map(tuple, found))


def _fewer(chosen: list[int], turns: list[int], most: int) -> tuple[list[int], list[int]]:
    """Keep evenly spaced cuts where there are too many."""
    if len(chosen) < most:
        return chosen, turns
    kept = sorted({round(i * (len(chosen) - 1) / (most - 2)) for i in range(most - 1)})
    return [chosen[i] for i in kept], [turns[i] for i in kept]


def _inputs(graph: Graph, phases: Phases, stage: Mapping[OpId, int]) -> Iterable[ValueId]:
    read = (v for op in sorted(stage) for v in graph.op(op).inputs)
    outside = (v for v in read if graph.value(v).op not in stage and graph.value(v).is_tensor)
    return sorted({v for v in outside if phases.activation[v]})


def _repeatable(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    """Tell whether an operation may run again: as the rule ``recompute`` requires.

    What reads no tensor that is computed from data would read the same again, and be merged.
    """
    op = graph.op(op_id)
    if not any(phases.activation[v] and graph.value(v).is_tensor for v in op.inputs):
        return False
    facts = effects.of(op.type)
    alone = facts.known and facts.pure and not op.stateful and not (facts.reads or facts.writes)
    return alone and not (variables.touches(graph, op_id) or op.frame or phases.guard[op_id])
