"""Chooses where a step is cut: points of the forward phase whose total gradient can be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tflms.checkpointing.gradients import Spine
from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases

# Operations whose gradient reads their output: its last late reader belongs to their own stage.
_GRADIENT_READS_OUTPUT_NAMES = """
    Relu Relu6 Elu Selu Tanh Sigmoid Softmax LogSoftmax Exp Sqrt Rsqrt Reciprocal Inv MaxPool
    MaxPoolV2 MaxPool3D Max Min Prod SegmentMax SegmentMin Cholesky MatrixInverse
"""
_GRADIENT_READS_OUTPUT = frozenset(_GRADIENT_READS_OUTPUT_NAMES.split())
_SUMS = frozenset(["Add", "AddV2", "AddN"])


def find_turns(
    graph: Graph,
    phases: Phases,
    points: Sequence[OpId],
    index: Mapping[OpId, int],
    spine: Spine,
    base: int,
) -> tuple[list[int], list[int]]:
    """Choose articulation points whose total gradient is on the spine.

    Args:
        graph: the graph.
        phases: its phases.
        points: the articulation points of the forward phase, the first is number 1.
        index: per operation of the forward phase, the point up to which it counts.
        spine: what all gradients pass.
        base: points up to this number are left out.

    Returns:
        the numbers of the chosen points, and the place on the spine of each one's gradient.
    """
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
                    # What hangs on a place reads the gradient there and is done before the next.
                    at_point[number] = max(at_point[number], needs + (held == needs))
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
    waitable = [place for place, op in enumerate(spine.ops) if usable(graph, phases, op)]
    beyond, previous = latest[count + 1], -1
    for number in range(count, base, -1):
        op = graph.op(points[number - 1])
        reads_output = op.type in _GRADIENT_READS_OUTPUT and last_on[number] >= 0
        behind = -1 if reads_output else at_point[number]
        low = max(previous + 1, beyond, behind)
        high = min(first[number], last_on[number] if reads_output else len(spine.ops))
        output = single_output(graph, phases, points[number - 1], index)
        if output is not None and number < count and read[number] and low <= high:
            high = min(high, len(spine.ops) - 1)
            turn = _pick(graph, spine, output, low, high, reads_output)
            if turn is not None:  # rather a little later, where something can wait for it
                turn = next((place for place in waitable if turn <= place <= high), turn)
            if turn is not None and waitable and waitable[0] <= turn:
                chosen.append(number)
                turns.append(turn)
                previous = turn
        beyond = max(beyond, latest[number], at_point[number])
    return chosen[::-1], turns[::-1]


def usable(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    """Tell whether others may wait for a gradient, itself or a copy: no number may change."""
    op = graph.op(op_id)
    if op.frame or phases.guard[op_id] or not any(phases.activation[v] for v in op.outputs):
        return False
    return signals(graph, op_id) or watched(graph, op_id) is not None


def signals(graph: Graph, op_id: OpId) -> bool:
    """Tell whether others may wait for an operation by a control edge."""
    op = graph.op(op_id)
    if not any(_is_real(graph, v) for v in op.outputs):
        return False
    return effects.signals(op.type, _reader_types(graph, op_id)) or _stays_a_sum(graph, op_id)


def _reader_types(graph: Graph, op_id: OpId) -> list[str]:
    """Types of what reads an operation's results, through identities, which Grappler takes out."""
    found: list[str] = []
    stack = [op_id]
    while stack:
        for reader in (use.op for v in graph.op(stack.pop()).outputs for use in graph.uses(v)):
            if graph.op(reader).type == "Identity":
                stack.append(reader)
            else:
                found.append(graph.op(reader).type)
    return found


def _stays_a_sum(graph: Graph, op_id: OpId) -> bool:
    """Tell whether Grappler leaves a sum of gradients as it is, waited for or not.

    It joins sums where the inner one has one reader, and draws a common factor out of products.
    A copy to wait for would do harm here: AddN of three and more adds in an order that depends on
    which of its inputs nobody else holds.
    """
    op = graph.op(op_id)
    if op.type not in _SUMS:
        return False
    if watched(graph, op_id) is None and _SUMS.intersection(_reader_types(graph, op_id)):
        return False
    makers = [graph.producer(v) for v in op.inputs]
    inner = (m for m in makers if m.type in _SUMS)
    if any(len({use.op for v in m.outputs for use in graph.uses(v)}) < 2 for m in inner):
        return False
    return not all(m.type == "Mul" for m in makers)


def watched(graph: Graph, op_id: OpId) -> ValueId | None:
    """Return the result of an operation of which a copy may be taken, for others to wait for."""
    for value in graph.op(op_id).outputs:
        readers = {use.op for use in graph.uses(value) if not graph.op(use.op).role}
        if len(readers) > 1 and _is_real(graph, value):
            return value
    return None


def _is_real(graph: Graph, value: ValueId) -> bool:
    v = graph.value(value)
    return v.dtype in ("f32", "f16", "bf16", "f64") and v.shape != ()


def single_output(
    graph: Graph, phases: Phases, op: OpId, index: Mapping[OpId, int]
) -> ValueId | None:
    """Return the only value of an operation that the forward phase goes on with, if real."""
    readers = [
        v
        for v in graph.op(op).outputs
        if any(use.op in index and phases.forward[use.op] for use in graph.uses(v))
    ]
    kinds = (graph.op(use.op).type for value in readers for use in graph.uses(value))
    made = graph.op(op).type
    if len(readers) != 1 or effects.of(made).view or effects.vanishes(made, kinds):
        return None  # a view keeps what it shows; what a kernel takes in may never exist
    return readers[0] if _is_real(graph, readers[0]) else None


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
