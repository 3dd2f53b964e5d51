"""Decides which IdentityN operations are read slot by slot, as each output shows one input alone.

Optimizers and custom gradients hand their tensors through one IdentityN, which ties them together:
no reader may start before the last input is there. TensorFlow takes the operation out of graphs
and functions before they run (grappler/optimizers/dependency_optimizer.cc lets consumers read the
inputs), so each weight's gradient goes to its update alone. The IR shows that: an operation per
slot, which the readers of that output read. The operation itself stays, for fetches and for those
that wait for it, and nothing reads it. Where the tie is the only thing that keeps an order which
the numbers depend on, it is left whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from tflms.graph import effects, order, variables
from tflms.graph.ir import Graph, OpId, ValueId


def split(graph: Graph, *, whole_runs: bool) -> dict[OpId, tuple[OpId, int]]:
    """Give each IdentityN that may be taken apart an operation per slot, and its readers those.

    Args:
        graph: a graph that is not sealed yet.
        whole_runs: every run needs all effects of the graph, as it is with functions.

    Returns:
        per new operation, the IdentityN and which of its slots it is.
    """
    tied = [op.id for op in graph.ops() if op.type == "IdentityN" and _separable(graph, op.id)]
    if not tied:
        return {}
    topological = order.topological(graph)
    guards = order.guards(graph, topological)
    tied = [op for op in tied if not guards[op]]
    touched = _touched(graph)
    while tied:
        kept = _needed_ties(graph, topological, set(tied), touched, whole_runs=whole_runs)
        if not kept:
            break
        tied = [op for op in tied if op not in kept]
    return {slot: made for op in tied for slot, made in _split_one(graph, op).items()}


def _separable(graph: Graph, op_id: OpId) -> bool:
    """Tell whether what reads an output may read the input instead, as far as one can see here."""
    op = graph.op(op_id)
    if len(op.outputs) < 2 or len(op.inputs) != len(op.outputs) or op.controls or op.frame:
        return False
    sources = [graph.value(v) for v in op.inputs]
    if any(not v.is_tensor or graph.op(v.op).frame for v in sources):
        return False
    # Through another device, a value would make the way in between.
    if any(graph.op(v.op).device != op.device for v in sources):
        return False
    return [v.dtype for v in sources] == [graph.value(v).dtype for v in op.outputs]


def _split_one(graph: Graph, op_id: OpId) -> dict[OpId, tuple[OpId, int]]:
    op = graph.op(op_id)
    made: dict[OpId, tuple[OpId, int]] = {}
    for index, value in enumerate(op.outputs):
        v, source = graph.value(value), op.inputs[index]
        slot = graph.add(
            f"{op.name}:{index}",  # no operation of TensorFlow's can be called so
            op.type,
            inputs=[source],
            outputs=[(v.dtype, v.shape)],
            device=op.device,
        )
        made[slot.id] = (op_id, index)
        for use in graph.uses(value):
            graph.rewire(use, slot.outputs[0])
    return made


# what the tie may keep in order -------------------------------------------------------------------


class _Touched:
    """Operations whose order can show: a bit for each, and which others each must come behind.

    Attributes:
        bit: per operation that reads or overwrites a variable, or does what nobody knows.
        rivals: per such operation, the bits of those that must keep their order to it.
        lasting: bits of those whose run leaves something behind.
    """

    def __init__(self) -> None:
        self.bit: dict[OpId, int] = {}
        self.rivals: dict[OpId, int] = {}
        self.lasting = 0


def _touched(graph: Graph) -> _Touched:
    found = _Touched()
    reading: dict[OpId | None, int] = {}
    writing: dict[OpId | None, int] = {}
    places: dict[OpId, list[tuple[OpId | None, bool]]] = {}
    for op in graph.ops():
        touches = _touches(graph, op.id)
        if not touches:
            continue
        bit = found.bit[op.id] = 1 << len(found.bit)
        places[op.id] = touches
        for owner, writes in touches:
            where = writing if writes else reading
            where[owner] = where.get(owner, 0) | bit
            if writes:
                found.lasting |= bit
    for op_id, touches in places.items():
        for owner, writes in touches:
            rivals = writing.get(owner, 0) | (reading.get(owner, 0) if writes else 0)
            found.rivals[op_id] = found.rivals.get(op_id, 0) | rivals
    return found


def _touches(graph: Graph, op_id: OpId) -> list[tuple[OpId | None, bool]]:
    """Which variables an operation touches, and whether it overwrites them; None is the world."""
    op = graph.op(op_id)
    facts = effects.of(op.type)
    hands_on = facts.view and not facts.reads
    if effects.owns_variable(op.type) or hands_on or op.type in effects.CONTROL_FLOW:
        return []
    found: list[tuple[OpId | None, bool]] = []
    for slot, value in enumerate(op.inputs):
        if (owner := variables.owner(graph, value)) is not None and owner != op_id:
            found.append((owner, slot in facts.writes or slot not in facts.reads))
    if op.stateful and not facts.reads and not facts.writes:
        found.append((None, True))
    return found


def _needed_ties(
    graph: Graph,
    topological: Sequence[OpId],
    tied: set[OpId],
    touched: _Touched,
    *,
    whole_runs: bool,
) -> set[OpId]:
    """Which of the operations keep an order that nothing else keeps, or drag something into runs.

    Masks of what comes before each operation are taken along the order, with and without ties.
    """
    if not touched.bit:
        return set()
    through = [0] * graph.size  # what comes before an operation, itself included
    apart = [0] * graph.size  # the same where each slot stands for itself
    ties = [0] * graph.size  # a bit for each tie that an operation comes behind
    tie_bit = {op: 1 << number for number, op in enumerate(sorted(tied))}
    kept = 0
    for op_id in topological:
        op = graph.op(op_id)
        mine = touched.bit.get(op_id, 0)
        together = split_up = behind = 0
        for before in graph.predecessors(op_id):
            together |= through[before]
            behind |= ties[before]
        for value in op.inputs:
            source = _shown(graph, value, tied)
            if graph.orders(source, op_id):
                split_up |= apart[source]
        for before in op.controls:
            if graph.orders(before, op_id):
                split_up |= apart[before]
        lost = together & ~split_up
        if lost and mine and lost & touched.rivals[op_id]:
            kept |= behind
        if lost and not whole_runs and behind and lost & touched.lasting:
            kept |= behind
        through[op_id], apart[op_id] = together | mine, split_up | mine
        ties[op_id] = behind | tie_bit.get(op_id, 0)
    return {op for op, bit in tie_bit.items() if bit & kept}


def _shown(graph: Graph, value: ValueId, tied: set[OpId]) -> OpId:
    """The operation that makes what a value shows, seen through ties."""
    v = graph.value(value)
    while v.op in tied:
        v = graph.value(graph.op(v.op).inputs[v.index])
    return v.op
