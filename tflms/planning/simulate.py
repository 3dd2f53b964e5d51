"""Replays a step on paper: which values are on the device when, and what the peak will be.

A prediction, and labelled so wherever it is shown: operations run one after another in the order
in which the runtime's executor makes them ready; an operation takes over the buffer of an input
that nobody else needs, as TensorFlow's kernels do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.planning.cost import Sizes

# Kernels that write over an input of the same size when nobody else needs it.
_FORWARDING = frozenset(
    "Add AddV2 AddN Sub Mul RealDiv Div DivNoNan Maximum Minimum Pow SquaredDifference Neg Abs Exp Log Log1p "
    "Expm1 Sqrt Rsqrt Square Sigmoid Tanh Sin Cos Softplus Softsign Relu Relu6 Elu Selu LeakyRelu BiasAdd "
    "ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SigmoidGrad TanhGrad SqrtGrad RsqrtGrad SoftplusGrad "
    "Reciprocal Erf Floor Round Sign Cast Softmax LogSoftmax Select SelectV2 ClipByValue "
    "FusedBatchNormV3 FusedBatchNormGradV3".split()
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a simulated step does to memory; all sizes are bytes and all are predictions.

    Attributes:
        order: operations in the order in which they ran.
        resident: bytes on the device while each of them ran, variables included.
        peak_bytes: the largest of these.
        peak_op: the operation that ran then.
        top: the values that were resident then, largest first, with their bytes.
        host_peak_bytes: the most that was parked on the host at one time.
        moved_bytes: bytes that travelled to the host (as many travel back, or more).
    """

    order: tuple[OpId, ...]
    resident: tuple[int, ...]
    peak_bytes: int
    peak_op: OpId | None
    top: tuple[tuple[ValueId, int], ...]
    host_peak_bytes: int
    moved_bytes: int


def executor_order(graph: Graph, within: set[OpId]) -> list[OpId]:
    """Return operations in the order in which a first-in first-out executor makes them ready."""
    waiting: dict[OpId, int] = {}
    ready: deque[OpId] = deque()
    for op in graph.ops():
        if op.id not in within:
            continue
        count = sum(p in within for p in graph.predecessors(op.id))
        waiting[op.id] = count
        if not count:
            ready.append(op.id)
    order: list[OpId] = []
    while ready:
        op_id = ready.popleft()
        order.append(op_id)
        for after in graph.successors(op_id):
            if after in waiting:
                waiting[after] -= 1
                if not waiting[after]:
                    ready.append(after)
    return order


class _Memory:
    """Buffers on the device, each with the values that live in it."""

    def __init__(self, graph: Graph, weights: Sizes, within: set[OpId]) -> None:
        self.graph, self.weights, self.within = graph, weights, within
        self.buffer: dict[ValueId, int] = {}
        self.size: dict[int, int] = {}
        self.readers: dict[int, int] = {}
        self.owner: dict[int, ValueId] = {}
        self.resident = weights.variable_nbytes
        self._next = 0

    def readers_of(self, value: ValueId) -> int:
        return sum(use.op in self.within for use in self.graph.uses(value))

    def new(self, value: ValueId, nbytes: int) -> None:
        self._next += 1
        self.buffer[value] = self._next
        self.size[self._next] = nbytes
        self.readers[self._next] = self.readers_of(value)
        self.owner[self._next] = value
        self.resident += nbytes

    def share(self, value: ValueId, source: ValueId) -> None:
        buffer = self.buffer.get(source)
        if buffer is None:
            self.new(value, 0)
            return
        self.buffer[value] = buffer
        self.readers[buffer] += self.readers_of(value)

    def done_reading(self, value: ValueId) -> None:
        buffer = self.buffer.get(value)
        if buffer is None:
            return
        self.readers[buffer] -= 1
        if self.readers[buffer] <= 0:
            self.free(buffer)

    def free_if_unread(self, value: ValueId) -> None:
        buffer = self.buffer.get(value)
        if buffer is not None and self.readers[buffer] <= 0:
            self.free(buffer)

    def free(self, buffer: int) -> None:
        self.resident -= self.size.pop(buffer, 0)
        self.readers[buffer] = 1 << 60


def simulate(graph: Graph, weights: Sizes, within: set[OpId]) -> Timeline:
    """Run the operations of a step on paper.

    Args:
        graph: the graph, rewritten or not.
        weights: sizes and placement, of this very graph.
        within: the operations that run; inserted ones among them.
    """
    order = executor_order(graph, within)
    memory = _Memory(graph, weights, within)
    host: dict[ValueId, int] = {}
    host_now = host_peak = moved = 0
    resident: list[int] = []
    peak, peak_at = -1, -1
    top: tuple[tuple[ValueId, int], ...] = ()
    for place, op_id in enumerate(order):
        op = graph.op(op_id)
        if op.role == "swap_out":
            host_now += weights.nbytes[op.outputs[0]]
            moved += weights.nbytes[op.outputs[0]]
            host[op.outputs[0]] = sum(u.op in within for u in graph.uses(op.outputs[0]))
            host_peak = max(host_peak, host_now)
        elif op.role == "swap_in":
            memory.new(op.outputs[0], weights.nbytes[op.outputs[0]])
            host[op.inputs[0]] -= 1
            if not host[op.inputs[0]]:
                host_now -= weights.nbytes[op.inputs[0]]
        elif weights.on_device[op_id]:
            _run(graph, weights, memory, op_id)
        resident.append(memory.resident)
        if memory.resident > peak:
            peak, peak_at = memory.resident, place
            live = [(memory.owner[b], n) for b, n in memory.size.items() if n]
            top = tuple(sorted(live, key=lambda item: (-item[1], item[0]))[:10])
        for value in op.inputs:
            memory.done_reading(value)
        for value in op.outputs:
            memory.free_if_unread(value)
    return Timeline(
        tuple(order), tuple(resident), max(peak, 0), order[peak_at] if order else None, top,
        host_peak, moved,
    )  # fmt: skip


def _run(graph: Graph, weights: Sizes, memory: _Memory, op_id: OpId) -> None:
    op = graph.op(op_id)
    facts = effects.of(op.type)
    for index, value in enumerate(op.outputs):
        nbytes = weights.nbytes[value]
        if facts.reads and not facts.writes:
            memory.new(value, 0)  # a read shares the variable's buffer
        elif facts.view and op.inputs:
            memory.share(value, op.inputs[0])
        elif index == 0 and op.type in _FORWARDING and (source := _donor(memory, op_id, nbytes)):
            memory.share(value, source)
        else:
            memory.new(value, nbytes)


def _donor(memory: _Memory, op_id: OpId, nbytes: int) -> ValueId | None:
    """An input of that size whose buffer nobody else will read."""
    for value in memory.graph.op(op_id).inputs:
        buffer = memory.buffer.get(value)
        if (
            buffer is not None
            and memory.size.get(buffer) == nbytes
            and memory.readers[buffer] == 1
            and nbytes
        ):
            return value
    return None
