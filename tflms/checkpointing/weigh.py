"""Weighs the stages of a cut step: what each keeps, what it needs while it runs, how long it takes.

Sizes come from the graph. A stage's forward and backward are replayed on paper, one operation after
the other, with views and with kernels that write over an input; what that needs beyond what stays
is the stage's workspace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tflms.checkpointing.chain import Chain
from tflms.checkpointing.crossing import root
from tflms.checkpointing.stages import Cut
from tflms.graph import effects
from tflms.graph.ir import OpId, ValueId
from tflms.planning import kernels
from tflms.planning.allocator import rounded
from tflms.planning.cost import Costs, Sizes


def weigh(cut: Cut, weights: Sizes, costs: Costs, forward_only: Costs | None = None) -> Chain:
    """Return a cut step as a chain.

    Args:
        cut: the stages.
        weights: bytes of the graph's values.
        costs: seconds and workspaces of its operations, estimated or measured.
        forward_only: the same for a forward that keeps nothing, where it was measured apart.
    """
    scale = _Scale(cut, weights, costs)
    only = scale if forward_only is None else _Scale(cut, weights, forward_only)
    stages = range(1, cut.stages + 1)
    activations = [scale.inputs(), *(scale.total(scale.output(i)) for i in stages)]
    needed = [scale.needed(stage) for stage in stages]
    saved = [scale.saved(stage) for stage in stages]
    forward_peaks = [scale.peak(cut.forward[i], saved[i]) for i in range(cut.stages)]
    only_peaks = [only.peak(needed[i], scale.output(i + 1)) for i in range(cut.stages)]
    gradients = [0, *(scale.gradient(i) for i in stages)]
    kept = [max(scale.total(saved[i]), activations[i + 1]) for i in range(cut.stages)]
    return Chain(
        forward_seconds=[scale.seconds(cut.forward[i]) for i in range(cut.stages)],
        backward_seconds=[scale.seconds(cut.backward[i]) for i in range(cut.stages)],
        activation_bytes=activations,
        saved_bytes=kept,
        gradient_bytes=gradients,
        forward_overhead_bytes=[max(0, forward_peaks[i] - kept[i]) for i in range(cut.stages)],
        backward_overhead_bytes=[scale.backward_overhead(stage, gradients) for stage in stages],
        forward_only_seconds=[only.seconds(needed[i]) for i in range(cut.stages)],
        forward_only_overhead_bytes=[
            max(0, only_peaks[i] - activations[i + 1]) for i in range(cut.stages)
        ],
    )


class _Scale:
    def __init__(self, cut: Cut, weights: Sizes, costs: Costs) -> None:
        self.cut, self.graph = cut, cut.graph
        self.weights, self.costs = weights, costs

    def nbytes(self, value: ValueId) -> int:
        return rounded(self.weights.nbytes[value])

    def total(self, values: Iterable[ValueId]) -> int:
        return sum(self.nbytes(v) for v in values)

    def seconds(self, ops: Iterable[OpId]) -> float:
        return math.fsum(self.costs.seconds[op] for op in ops)

    def inputs(self) -> int:
        """Bytes of a^0: what the first stage reads and other stages do not make."""
        cut, first = self.cut, set(self.cut.forward[0])
        read = {v for op in first for v in self.graph.op(op).inputs}
        return self.total({root(self.graph, v) for v in cut.inputs if v in read})

    def output(self, stage: int) -> set[ValueId]:
        """Buffers of a^l that go when it goes; what is kept anyway is none of them."""
        if stage > len(self.cut.outputs):
            return set()
        own = {root(self.graph, v) for v in self.cut.outputs[stage - 1]}
        return {home for home in own if home not in self.cut.kept}

    def handed(self, stage: int) -> frozenset[ValueId]:
        """Buffers of d^l; of d^n, the loss's, and of d^0, none."""
        if not 0 < stage <= len(self.cut.outputs):
            return frozenset()
        return frozenset(root(self.graph, v) for v in self.cut.gradients[stage])

    def gradient(self, stage: int) -> int:
        """Bytes of d^l."""
        return self.total(self.handed(stage))

    def needed(self, stage: int) -> list[OpId]:
        """Operations that the stage's output needs."""
        graph, own = self.graph, set(self.cut.forward[stage - 1])
        if stage > len(self.cut.outputs):
            ends = [op for op in own if self.cut.phases.forward[op]]
        else:
            ends = [graph.value(v).op for v in self.cut.outputs[stage - 1]]
        found, stack = set(ends), list(ends)
        while stack:
            for value in graph.op(stack.pop()).inputs:
                source = graph.value(value).op
                if source in own and source not in found and value not in self.cut.kept:
                    found.add(source)
                    stack.append(source)
        return [op for op in self.cut.forward[stage - 1] if op in found]

    def saved(self, stage: int) -> set[ValueId]:
        """Buffers that the stage's backward reads of its forward, and its output."""
        graph, cut = self.graph, self.cut
        own = set(cut.forward[stage - 1])
        found = self.output(stage)
        for op in cut.forward[stage - 1]:
            for value in graph.op(op).outputs:
                home = root(graph, value)
                if graph.value(home).op not in own or not graph.value(value).is_tensor:
                    continue
                if home in cut.kept or value in cut.kept:
                    continue
                if any(to == stage for _, _, to in cut.late_uses(value)):
                    found.add(home)
        return found

    def peak(
        self, ops: Sequence[OpId], kept: set[ValueId], given: frozenset[ValueId] = frozenset()
    ) -> int:
        """The most bytes of what operations make, or are given, that are alive at one time."""
        graph = self.graph
        own = set(ops)
        last: dict[ValueId, OpId] = {}
        for op_id in ops:
            for value in (*graph.op(op_id).inputs, *graph.op(op_id).outputs):
                home = root(graph, value)
                if graph.value(home).op in own or home in given:
                    last[home] = op_id
        ends: dict[OpId, list[ValueId]] = {}
        for home, op_id in last.items():
            if home not in kept:
                ends.setdefault(op_id, []).append(home)
        alive = peak = self.total(given)
        for op_id in ops:
            op = graph.op(op_id)
            made = [v for v in op.outputs if root(graph, v) == v and not self._free(op_id)]
            size = self.total(made)
            gone = self.total(v for v in ends.get(op_id, ()) if not self._free(graph.value(v).op))
            if op.type in kernels.FORWARDING and made and self._hands_on(op_id, ends):
                peak = max(peak, alive)
            else:
                peak = max(peak, alive + size + self.costs.workspace[op_id])
            alive += size - gone
        return peak

    def _hands_on(self, op_id: OpId, ends: dict[OpId, list[ValueId]]) -> bool:
        op = self.graph.op(op_id)
        size = self.nbytes(op.outputs[0])
        return any(self.nbytes(v) == size and v not in op.outputs for v in ends.get(op_id, ()))

    def _free(self, op_id: OpId) -> bool:
        facts = effects.of(self.graph.op(op_id).type)
        return not self.weights.on_device[op_id] or bool(facts.reads) or bool(facts.writes)

    def backward_overhead(self, stage: int, gradients: Sequence[int]) -> int:
        given, made = self.handed(stage) | self.saved(stage), self.handed(stage - 1)
        peak = self.peak(self.cut.backward[stage - 1], set(made), given)
        return max(0, peak - self.total(given) - gradients[stage - 1])
