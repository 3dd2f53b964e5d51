"""Has activations computed again that cost little, from values that are on the device then anyway.

A normalization or an activation function takes a fraction of the time that its result takes over a
link, and what it reads is often kept for the backward phase too. In the planned order, right before
such a result is needed for the first time, the operations that made it run once more; in between
it takes no room and no time of the link. What POFO (Beaumont et al. 2021) decides by stages is
decided here value by value; what is not cheap stays a matter of swapping.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tflms.graph.ir import Graph, OpId, Use, ValueId
from tflms.planning import kernels
from tflms.planning.cost import Costs, Sizes, device_kind
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies.lines import Chain

# Kernels that take about the time that it takes to touch what they read and write.
_CHEAP_TYPES = """
Add AddV2 BiasAdd FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 LeakyRelu Relu Relu6
"""
_CHEAP = frozenset(_CHEAP_TYPES.split())
_LONGEST = 4  # operations that run again for one value
_WORTH = 1.5  # times what it takes to compute a value again: so long must it be on the link
_ROOM = 0.4  # of what the limit leaves beside variables: so much may be read and made at once
_FUSED_ON = ("CPU", "GPU")  # where Grappler pulls operations into what they read


@dataclass(frozen=True, slots=True)
class _Late:
    """When the backward phase reads a value: places in the planned line."""

    uses: tuple[Use, ...]
    first: int
    last: int


def run(
    engine: Engine,
    links: Chain,
    wanted: Collection[ValueId],
    *,
    weights: Sizes,
    costs: Costs,
    room: int,
    near: int,
    at_any_price: bool,
    default_kind: str,
) -> set[ValueId]:
    """Have what is cheap computed again.

    Args:
        engine: of the graph, whose order is fixed.
        links: the operations whose order is fixed.
        wanted: values that may leave the device.
        weights: what values weigh.
        costs: what operations and copies take.
        room: bytes that the limit leaves beside what stays all step long.
        near: what is read for it has to be needed within so many operations of the line.
        at_any_price: also where the link would be quicker, as nothing else keeps the limit.
        default_kind: the kind of device of operations that name none.

    Returns:
        the values that are computed again.
    """
    again, graph = _Again(engine, links, near, default_kind), engine.graph
    on_link = 1 / costs.to_host + 1 / costs.to_device

    def worth(value: ValueId, row: Sequence[OpId]) -> bool:
        """Tell whether it takes less time than the link, and leaves room for others."""
        if at_any_price:
            return True
        made = {v for op in row for v in graph.op(op).outputs}
        read = {v for op in row for v in graph.op(op).inputs} - made
        touched = max(weights.nbytes[v] for v in made) + sum(weights.nbytes[v] for v in read)
        seconds = sum(costs.seconds[op] for op in row)
        return touched <= _ROOM * room and seconds * _WORTH <= weights.nbytes[value] * on_link

    for value in sorted(wanted, key=lambda v: (engine.place(graph.value(v).op), v)):
        again.consider(value, worth)
    return again.done


def seeds(graph: Graph) -> tuple[OpId, ...]:
    """Return what starts the computations, in the order in which it was made."""
    return tuple(op.id for op in graph.ops() if op.role == "seed")


class _Again:
    def __init__(self, engine: Engine, links: Chain, near: int, default_kind: str) -> None:
        self.engine, self.links, self.near, self.kind = engine, links, near, default_kind
        self.graph: Graph = engine.graph
        self.places = [engine.place(op) for op in links.ops]
        self.done: set[ValueId] = set()
        self.known: dict[ValueId, _Late | None] = {}

    def consider(self, value: ValueId, worth: Callable[[ValueId, Sequence[OpId]], bool]) -> None:
        """Have a value of the forward phase computed again, if what that takes is worth it."""
        late, phases = self._late(value), self.engine.phases
        if late is None or late.first == 0 or late.last - late.first > self.near:
            return
        anchor, maker = self.links.ops[late.first - 1], self.graph.value(value).op
        if phases.forward[anchor] or not phases.forward[maker] or not self._may_lose(value, late):
            return
        row = self._row(value, late.first)
        if row is not None and worth(value, row) and self._apply(value, late, anchor, row):
            self.done.add(value)

    def _late(self, value: ValueId) -> _Late | None:
        """When the backward phase reads a value; None where it does not."""
        if value not in self.known:
            graph, phases = self.graph, self.engine.phases
            uses = tuple(
                use
                for use in graph.uses(value)
                if use.op < graph.original_ops
                and phases.step[use.op]
                and not phases.forward[use.op]
                and not kernels.reads_shape_only(graph, graph.op(use.op))
            )
            at = [bisect.bisect_left(self.places, self.engine.place(use.op)) for use in uses]
            self.known[value] = _Late(uses, min(at), max(at)) if uses else None
        return self.known[value]

    def _row(self, value: ValueId, first: int) -> list[OpId] | None:
        """The operations that make a value from what is there at a place, first to last."""
        graph = self.graph
        found: list[OpId] = []
        stack = [graph.value(value).op]
        while stack:
            op = graph.op(stack.pop())
            regrouped = kernels.in_sum_of_sums(graph, op.id) or op.frame
            if op.id in found:
                return None
            found.append(op.id)
            if op.type not in _CHEAP or op.role or regrouped or len(found) > _LONGEST:
                return None
            makers = [v for v in op.inputs if self._flows(v) and not self._there(v, first)]
            if not any(self._flows(v) for v in op.inputs):
                return None
            stack += [graph.value(v).op for v in makers]
        return found[::-1]

    def _flows(self, value: ValueId) -> bool:
        """Tell whether a value is computed in the step, from data."""
        activation = self.engine.phases.activation
        return value < len(activation) and activation[value]

    def _there(self, value: ValueId, first: int) -> bool:
        """Tell whether a value is on the device at a place anyway, or will be soon."""
        late = self._late(value)
        return (
            value not in self.done
            and late is not None
            and late.first - first <= self.near
            and late.last >= first - 1
        )

    def _may_lose(self, value: ValueId, late: _Late) -> bool:
        """Tell whether Grappler fuses no more than before, once late readers are gone."""
        graph = self.graph
        kind = device_kind(graph.producer(value).device, self.kind)
        left = {use.op for use in graph.uses(value)} - {use.op for use in late.uses}
        if kind not in _FUSED_ON or len(left) != 1:
            return True
        return all(graph.op(op).type in kernels.HEADS for op in left)

    def _apply(self, value: ValueId, late: _Late, anchor: OpId, row: list[OpId]) -> bool:
        """Apply the rules; where one refuses, all is as it was."""
        mark = len(self.graph.journal)
        now = self._computed(anchor, row)
        if now is not None:
            bindings = {"w": now[value], "late": late.uses}
            if isinstance(self.engine.apply(Application("recompute_use", bindings)), Applied):
                return True
        self.graph.rollback(mark)
        return False

    def _computed(self, anchor: OpId, row: list[OpId]) -> dict[ValueId, ValueId] | None:
        """Have a row of operations run again; return what there is now of each value, or None."""
        engine, graph = self.engine, self.graph
        now: dict[ValueId, ValueId] = {}
        for op_id in row:
            op = graph.op(op_id)
            sources = [v for v in dict.fromkeys(op.inputs) if self._flows(v)]
            for source in sources:
                if source not in now:
                    bindings = {"v": source, "anchor": anchor}
                    seed = engine.apply(Application("replay_segment", bindings))
                    if not isinstance(seed, Applied):
                        return None
                    now[source] = graph.op(OpId(seed.made["s"])).outputs[0]
            swapped = {source: now[source] for source in sources}
            clone = engine.apply(Application("recompute", {"f": op_id, "swapped": swapped}))
            if not isinstance(clone, Applied):
                return None
            made = graph.op(OpId(clone.made["c"])).outputs
            now.update(zip(op.outputs, made, strict=True))
        return now
