"""Lets a training step execute a schedule: which clone is made, when, and who reads it.

The first time that the schedule runs a stage, the user's own operations do it. Each later time is a
*pass*: clones that read what the schedule keeps. They start from a copy of it that waits for the
gradient behind which the schedule has them run. Clones are made only where somebody reads them: a
pass that keeps a stage's output only leaves the rest out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tflms.checkpointing.chain import Chain
from tflms.checkpointing.operations import Held, Item, Kind, Operation, replay
from tflms.checkpointing.stages import Cut
from tflms.checkpointing.turns import signals, watched
from tflms.errors import GraphError
from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, Use, Value, ValueId
from tflms.rewriting.engine import Application, Applied, Engine, Refusal


@dataclass(slots=True, eq=False)
class _Pass:
    """One run of one stage's forward; ``anchor`` is None for the first, the user's own."""

    stage: int
    anchor: OpId | None
    source: _Pass | None
    clones: dict[OpId, OpId] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recomputed:
    """An operation that runs again: its clones and what the first of them waits for."""

    op: OpId
    clones: tuple[OpId, ...]
    anchor: OpId

    def names(self, graph: Graph) -> tuple[str, tuple[str, ...], str]:
        """Return what people call the operation, its clones and the anchor."""
        clones = tuple(graph.op(clone).name for clone in self.clones)
        return graph.op(self.op).name, clones, graph.op(self.anchor).name


def execute(engine: Engine, cut: Cut, chain: Chain, operations: Iterable[Operation]) -> None:
    """Rewrite a step so that it executes a schedule, through the rules.

    Args:
        engine: for the graph that was cut.
        cut: its stages.
        chain: what they cost.
        operations: the schedule.

    Raises:
        GraphError: a rule refuses a step.
    """
    _Executor(engine, cut).run(chain, operations)


class _Executor:
    def __init__(self, engine: Engine, cut: Cut) -> None:
        self.engine, self.cut, self.graph = engine, cut, engine.graph
        self.seeds: dict[tuple[ValueId, OpId, ValueId | None], ValueId] = {}
        self.copies: dict[OpId, OpId] = {}
        self.may_signal: dict[OpId, bool] = {}
        self.last_readers: dict[OpId, list[OpId]] = {}
        self.reads: dict[int, dict[ValueId, list[Use]]] = {}
        for ops in cut.forward:
            for op in ops:
                for value in self.graph.op(op).outputs:
                    for reader, slot, stage in cut.late_uses(value):
                        at = self.reads.setdefault(stage, {}).setdefault(value, [])
                        at.append(Use(reader, slot))

    def run(self, chain: Chain, operations: Iterable[Operation]) -> None:
        holders: dict[Item, _Pass] = {}
        began: set[int] = set()
        done: list[int] = []  # stages whose backward ran since something waited for it
        anchor: OpId | None = None
        for step in replay(chain, operations).steps:
            kind, stage = step.operation
            source = holders.get(step.source)
            if kind is Kind.B:
                self._backward(stage, holders[Item(Held.SAVED, stage)], source)
                if stage > 1:
                    anchor = self._anchor(self.cut.anchors[stage - 2])
                    done.append(stage)
                    self.last_readers[anchor] = self._last_readers(done) + self._makers(stage - 1)
            else:
                first = stage not in began
                began.add(stage)
                done = done if first else []
                holders[step.produced] = _Pass(stage, None if first else anchor, source)
            for item in step.released:
                holders.pop(item, None)

    def _backward(self, stage: int, own: _Pass, source: _Pass | None) -> None:
        """Let the backward of a stage read what the last passes left."""
        for value, uses in self.reads.get(stage, {}).items():
            behind = stage - self.cut.stage[self.graph.value(value).op]
            made = own if behind == 0 else source if behind == 1 else None
            if made is None or made.anchor is None or not self.cut.again(value):
                continue
            late = tuple(use for use in uses if self._behind(use.op, made))
            if late:
                now = self._value(value, made)
                self._apply("recompute_use", {"w": now, "late": late})

    def _behind(self, reader: OpId, made: _Pass) -> bool:
        """Tell whether every run that needs a reader needs all that a pass waits for."""
        needed, anchors = self.cut.phases.needed_by, set[OpId]()
        here: _Pass | None = made
        while here is not None and here.anchor is not None:
            anchors.add(here.anchor)
            here = here.source
        sources = (original_op(self.graph, anchor) for anchor in anchors)
        return not any(needed[reader] & ~needed[source] for source in sources)

    def _anchor(self, op: OpId) -> OpId:
        """What is waited for: a gradient, or the copy of one that TensorFlow might fold or fuse."""
        value = None if signals(self.graph, op) else watched(self.graph, op)
        if value is None:
            return op
        if op not in self.copies:
            self.copies[op] = OpId(self._apply("recompute_anchor", {"v": value}).made["i"])
        return self.copies[op]

    def _last_readers(self, stages: Sequence[int]) -> list[OpId]:
        """What reads stages' values in their backward, apart from what goes on to the next one.

        Such as gradients of weights. Where they have not run yet, the values are still there.
        """
        values = (v for stage in stages for v in self.reads.get(stage, {}).values())
        uses = (use for uses in values for use in uses)
        found = dict.fromkeys(use.op for use in uses if not self.cut.spine.holds(use.op))
        return [op for op in found if self._signals(op)]

    def _makers(self, stage: int) -> list[OpId]:
        """What makes the gradients of all that crosses behind a stage, the anchor among them."""
        made = dict.fromkeys(self.graph.value(v).op for v in self.cut.gradients[stage])
        return [op for op in made if self._signals(op)]

    def _signals(self, op: OpId) -> bool:
        if op not in self.may_signal:
            self.may_signal[op] = signals(self.graph, op)
        return self.may_signal[op]

    def _value(self, value: ValueId, made: _Pass) -> ValueId:
        """What a pass has in place of a value."""
        if made.anchor is None or not self.cut.again(value):
            return value
        op = self.graph.value(value).op
        return self.graph.op(self._clone(op, made)).outputs[self.graph.value(value).index]

    def _clone(self, op_id: OpId, made: _Pass) -> OpId:
        """Return the clone of an operation in a pass; make it, and what it reads, if need be."""
        stack = [(op_id, made)]
        while stack:
            op_id, made = stack[-1]
            if op_id in made.clones:
                stack.pop()
                continue
            makers = [self._maker(value, made) for value in self.graph.op(op_id).inputs]
            needed = [pair for pair in makers if pair is not None]
            if not needed and (before := self._before(made)) is not None:
                needed = [(before[0].op, before[1])]
            waiting = [pair for pair in needed if pair[0] not in pair[1].clones]
            if waiting:
                stack += waiting
                continue
            made.clones[op_id] = self._repeat(op_id, made)
            stack.pop()
        return made.clones[op_id]

    def _maker(self, value: ValueId, made: _Pass) -> tuple[OpId, _Pass] | None:
        """Which clone makes an input of a clone; None where it is no clone."""
        op = self.graph.value(value).op
        stage = self.cut.stage.get(op)
        if stage is None or not self.cut.again(value):
            return None
        if stage == made.stage:
            return op, made
        source = made.source if stage == made.stage - 1 else None
        return (op, source) if source is not None and source.anchor is not None else None

    def _before(self, made: _Pass) -> tuple[Value, _Pass] | None:
        """What an operation of a pass waits for that reads kept values only: the stage before.

        Else such operations of all stages that run again would run at once.
        """
        source = made.source
        if source is None or source.anchor is None or source.anchor != made.anchor:
            return None
        handed = (v for v in self.cut.outputs[source.stage - 1] if self.cut.again(v))
        return next(((self.graph.value(v), source) for v in handed), None)

    def _repeat(self, op_id: OpId, made: _Pass) -> OpId:
        graph = self.graph
        assert made.anchor is not None
        swapped: dict[ValueId, ValueId] = {}
        makers = {v: self._maker(v, made) for v in dict.fromkeys(graph.op(op_id).inputs)}
        behind = None if any(makers.values()) else self._before(made)
        gate = graph.op(behind[1].clones[behind[0].op]).outputs[behind[0].index] if behind else None
        for value, maker in makers.items():
            if maker is None:
                if self.cut.phases.activation[value] and graph.value(value).is_tensor:
                    swapped[value] = self._seed(value, made.anchor, gate)
                continue
            op, other = maker
            now = graph.op(other.clones[op]).outputs[graph.value(value).index]
            late = other is not made and other.anchor != made.anchor
            swapped[value] = self._seed(now, made.anchor) if late else now
        applied = self._apply("recompute", {"f": op_id, "swapped": swapped})
        return OpId(applied.made["c"])

    def _seed(self, value: ValueId, anchor: OpId, gate: ValueId | None = None) -> ValueId:
        """A copy of a value that waits for an anchor, and for what a clone makes; made once."""
        if (value, anchor, gate) not in self.seeds:
            applied = self._apply("replay_segment", {"v": value, "anchor": anchor})
            seed = OpId(applied.made["s"])
            self.seeds[value, anchor, gate] = self.graph.op(seed).outputs[0]
            if gate is not None:
                self._apply("recompute_guard", {"v": gate, "s": seed})
            for reader in self.last_readers[anchor]:
                if reader != anchor and self.engine.place(reader) < self.engine.place(seed):
                    self.engine.apply(Application("order", {"a": reader, "b": seed}))
        return self.seeds[value, anchor, gate]

    def _apply(self, rule: str, bindings: Mapping[str, object]) -> Applied:
        outcome = self.engine.apply(Application(rule, bindings))
        if isinstance(outcome, Refusal):
            raise GraphError(
                f"recomputation is not possible here: rule {rule!r} refuses, {outcome.reason}"
            )
        return outcome


def recomputed_in(graph: Graph) -> list[Recomputed]:
    """Return the operations that run again in a rewritten graph; shape operations do not count."""
    clones: dict[OpId, list[OpId]] = {}
    for op in graph.ops():
        if op.role == "clone" and op.origin is not None and not effects.takes_shape(op.type):
            clones.setdefault(op.origin, []).append(op.id)
    return [Recomputed(op, tuple(made), _start(graph, made[0])) for op, made in clones.items()]


def original_op(graph: Graph, op_id: OpId) -> OpId:
    """Return an operation of the user's, or the one that an inserted copy was taken of."""
    op = graph.op(op_id)
    return graph.value(op.inputs[0]).op if op.role else op.id


def _start(graph: Graph, op_id: OpId) -> OpId:
    """What the seed of a clone waits for."""
    op = graph.op(op_id)
    while op.role != "seed":
        op = next(o for v in op.inputs if (o := graph.producer(v)).role in ("seed", "clone"))
    return original_op(graph, op.controls[0])
