"""Has activations computed again that cost little, from values that are on the device then anyway.

A normalization, an activation function or a convolution of few channels takes a fraction of the
time that its result takes over a link, and what it reads is often kept for the backward phase too.
In the planned order, right before such a result is needed for the first time, the operations that
made it run once more; in between it takes no room and no time of the link. What POFO (Beaumont et
al. 2021) decides by stages is decided here value by value; what is not cheap stays a matter of
swapping.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tflms.graph.ir import Graph, Op, OpId, Use, ValueId
from tflms.planning import kernels
from tflms.planning.cost import Costs, Sizes, device_kind
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies.lines import Chain

# Kernels that take about the time that it takes to touch what they read and write.
_CHEAP_TYPES = """
Add AddV2 BiasAdd FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 LeakyRelu Relu Relu6
"""
_CHEAP = frozenset(_CHEAP_TYPES.split())
# Kernels of which only some are quicker than the link. Grappler fuses them with what reads them,
# but not with a normalization that is being trained.
_PRODUCTS = frozenset(["Conv2D", "Conv3D", "DepthwiseConv2dNative"])
_NORMALIZATIONS = frozenset(["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"])
_THEIR_GRADIENTS = frozenset(["FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"])
_LONGEST = 8  # operations that run again for one value
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
    part: float | None,
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
        part: of the bytes that the link would take longer for, those first that take least time a
            byte; None: whatever takes about the time to touch it, also where the link would be
            quicker, as nothing else keeps the limit.
        default_kind: the kind of device of operations that name none.

    Returns:
        the values that are computed again.
    """
    again = _Again(engine, links, near, default_kind, costs, products=part is not None)
    chosen = [value for value in wanted if again.possible(value)]
    if part is not None:
        on_link = 1 / costs.to_host + 1 / costs.to_device

        def quicker(value: ValueId, row: Sequence[OpId]) -> bool:
            return _touched(engine.graph, weights, row) <= _ROOM * room and (
                again.seconds(row) * _WORTH <= weights.nbytes[value] * on_link
            )

        alone = {v: again.row(v, None) for v in chosen}
        rows = {v: row for v, row in alone.items() if row is not None and quicker(v, row)}
        chosen = _cheapest(
            {v: (again.seconds(row), weights.nbytes[v]) for v, row in rows.items()}, part
        )
    for value in sorted(chosen, key=lambda v: (engine.place(engine.graph.value(v).op), v)):
        row = again.row(value, again.first(value))
        if row is not None and (part is None or quicker(value, row)):
            again.dropped.add(value)
    for value in sorted(again.dropped, key=lambda v: (again.first(v), v)):
        if value not in again.done:
            again.compute(value)
    return again.done


def seeds(graph: Graph) -> tuple[OpId, ...]:
    """Return what starts the computations, in the order in which it was made."""
    return tuple(op.id for op in graph.ops() if op.role == "seed")


def _cheapest(prices: dict[ValueId, tuple[float, int]], part: float) -> list[ValueId]:
    """Values that take least seconds a byte, up to a part of all bytes."""
    found: list[ValueId] = []
    left = part * sum(nbytes for _, nbytes in prices.values())
    for value in sorted(prices, key=lambda v: (prices[v][0] / max(1, prices[v][1]), v)):
        if left > 0:
            found.append(value)
        left -= prices[value][1]
    return found


def _touched(graph: Graph, weights: Sizes, row: Sequence[OpId]) -> int:
    """Bytes that a row of operations reads, and the most that one of its results takes."""
    made = {v for op in row for v in graph.op(op).outputs}
    read = {v for op in row for v in graph.op(op).inputs} - made
    return max(weights.nbytes[v] for v in made) + sum(weights.nbytes[v] for v in read)


class _Again:
    """Computes values again.

    Attributes:
        dropped: the values that are to be computed again.
        done: those for which it is seen to.
    """

    def __init__(
        self,
        engine: Engine,
        links: Chain,
        near: int,
        default_kind: str,
        costs: Costs,
        *,
        products: bool,
    ) -> None:
        self.engine, self.links, self.near, self.kind = engine, links, near, default_kind
        self.graph: Graph = engine.graph
        self.costs, self.products = costs, products
        self.places = [engine.place(op) for op in links.ops]
        self.dropped: set[ValueId] = set()
        self.done: set[ValueId] = set()
        self.known: dict[ValueId, _Late | None] = {}
        self.repeatable: dict[OpId, bool] = {}
        self.fresh: dict[ValueId, tuple[ValueId, int]] = {}  # what there is anew, and until when

    def possible(self, value: ValueId) -> bool:
        """Tell whether a value of the forward phase is needed for a short while behind it."""
        late, phases = self.late(value), self.engine.phases
        if late is None or late.first == 0 or late.last - late.first > self.near:
            return False
        anchor, maker = self.links.ops[late.first - 1], self.graph.value(value).op
        apart = phases.forward[maker] and not phases.forward[anchor]
        return apart and self._may_lose(value, late)

    def first(self, value: ValueId) -> int:
        """The place in the planned line at which the backward phase first reads a value."""
        late = self.late(value)
        assert late is not None
        return late.first

    def seconds(self, row: Sequence[OpId]) -> float:
        """How long operations run."""
        return sum(self.costs.seconds[op] for op in row)

    def late(self, value: ValueId) -> _Late | None:
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

    def row(self, value: ValueId, first: int | None) -> list[OpId] | None:
        """The operations that make a value from what is there at a place, first to last.

        Without a place, whatever the backward phase reads is taken to be there.
        """
        graph = self.graph
        found: list[OpId] = []
        seen: set[OpId] = set()

        def visit(op_id: OpId) -> bool:
            if op_id in seen:
                return True
            op = graph.op(op_id)
            flowing = [v for v in op.inputs if self._flows(v)]
            if len(seen) == _LONGEST or not flowing or not self._may_repeat(op):
                return False
            seen.add(op_id)
            makers = [graph.value(v).op for v in flowing if not self._there(v, first)]
            if not all(visit(maker) for maker in makers):
                return False
            found.append(op_id)
            return True

        return found if visit(graph.value(value).op) else None

    def compute(self, value: ValueId) -> None:
        """Have a value computed again, and with it what else of this is to be and needed soon.

        Where a rule refuses, all is as it was.
        """
        first = self.first(value)
        row = self.row(value, first)
        if row is None:
            return
        mark, fresh, done = len(self.graph.journal), dict(self.fresh), set(self.done)
        now = self._computed(self.links.ops[first - 1], row, first)
        for one, clone in ({} if now is None else now).items():
            late = self.late(one)
            if late is None or one not in self.dropped - self.done:
                continue
            if first <= late.first and late.last - first <= self.near:
                bindings = {"w": clone, "late": late.uses}
                if isinstance(self.engine.apply(Application("recompute_use", bindings)), Applied):
                    self.done.add(one)
                    self.fresh[one] = (clone, late.last)
        if value not in self.done:
            self.graph.rollback(mark)
            self.fresh, self.done = fresh, done

    def _may_repeat(self, op: Op) -> bool:
        """Tell whether an operation is cheap enough, and the same kernel when it runs again."""
        if op.id not in self.repeatable:  # by who reads it before anything is computed again
            cheap = op.type in _CHEAP or (
                self.products and op.type in _PRODUCTS and self._feeds_normalization(op)
            )
            alone = not (op.role or op.frame or kernels.in_sum_of_sums(self.graph, op.id))
            self.repeatable[op.id] = cheap and alone
        return self.repeatable[op.id]

    def _feeds_normalization(self, op: Op) -> bool:
        """Tell whether a normalization that is being trained is all that reads an operation."""
        graph = self.graph
        readers = [graph.op(use.op) for value in op.outputs for use in graph.uses(value)]
        types = {r.type for r in readers if not r.role and not kernels.reads_shape_only(graph, r)}
        return types <= _NORMALIZATIONS | _THEIR_GRADIENTS and bool(types & _THEIR_GRADIENTS)

    def _flows(self, value: ValueId) -> bool:
        """Tell whether a value is computed in the step, from data."""
        activation = self.engine.phases.activation
        return value < len(activation) and activation[value]

    def _there(self, value: ValueId, first: int | None) -> bool:
        """Tell whether a value is on the device at a place anyway, or will be soon."""
        if first is None:
            return self.late(value) is not None
        if self._anew(value, first) is not None:
            return True
        late = self.late(value)
        return (
            value not in self.dropped
            and late is not None
            and late.first - first <= self.near
            and late.last >= first - 1
        )

    def _anew(self, value: ValueId, first: int) -> ValueId | None:
        """What there is of a value at a place that was computed again for an earlier one."""
        clone, until = self.fresh.get(value, (None, 0))
        return clone if clone is not None and first - until <= self.near else None

    def _may_lose(self, value: ValueId, late: _Late) -> bool:
        """Tell whether Grappler fuses no more than before, once late readers are gone."""
        graph = self.graph
        kind = device_kind(graph.producer(value).device, self.kind)
        left = {use.op for use in graph.uses(value)} - {use.op for use in late.uses}
        if kind not in _FUSED_ON or len(left) != 1:
            return True
        return all(graph.op(op).type in kernels.HEADS for op in left)

    def _computed(
        self, anchor: OpId, row: Sequence[OpId], first: int
    ) -> dict[ValueId, ValueId] | None:
        """Have a row of operations run again; return what there is now of each value, or None."""
        engine, graph = self.engine, self.graph
        now: dict[ValueId, ValueId] = {}
        for op_id in row:
            op = graph.op(op_id)
            sources = [v for v in dict.fromkeys(op.inputs) if self._flows(v)]
            for source in sources:
                if source not in now:
                    read = self._anew(source, first)
                    bindings = {"v": source if read is None else read, "anchor": anchor}
                    seed = engine.apply(Application("replay_segment", bindings))
                    if not isinstance(seed, Applied):
                        return None
                    now[source] = graph.op(OpId(seed.made["s"])).outputs[0]
                    if read is not None:
                        self.fresh[source] = (read, max(first, self.fresh[source][1]))
            swapped = {source: now[source] for source in sources}
            clone = engine.apply(Application("recompute", {"f": op_id, "swapped": swapped}))
            if not isinstance(clone, Applied):
                return None
            made = graph.op(OpId(clone.made["c"])).outputs
            now.update(zip(op.outputs, made, strict=True))
        return now
