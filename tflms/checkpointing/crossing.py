"""Puts the forward phase into a row, and knows what crosses from the front of it to the back.

Behind every operation of the row, a step may be cut. What lies in front is needed behind only
through the values that cross; where a single one does, the operation that makes it is an
articulation point of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tflms.graph import effects, variables
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases, as_made

_MOST_VALUES = 48  # where more values cross, nobody wants to cut


@dataclass(frozen=True, slots=True)
class Line:
    """The forward operations that compute from data and variables, in a row.

    Attributes:
        ops: these operations in the order in which the program made them; no. 1 is the first.
        number: their numbers; and those of late operations that compute from forward values
            alone, as the derivative of a square: the number of the last one that they read.
        last: per value of theirs that one of them reads, the number of its last reader.
        across: per number (entry 0: none), the values that later operations read; None: many.
    """

    ops: tuple[OpId, ...]
    number: Mapping[OpId, int]
    last: Mapping[ValueId, int]
    across: tuple[tuple[ValueId, ...] | None, ...]


def path(graph: Graph, phases: Phases) -> list[OpId]:
    """Forward operations that compute from data and variables; what is shared is left out.

    They come as the program made them, which runs branch after branch, as far as edges allow.
    """
    learned: set[OpId] = set()
    found: list[OpId] = []
    for op_id in as_made(graph, [o for o in phases.order if phases.step[o] and phases.forward[o]]):
        op = graph.op(op_id)
        facts = effects.of(op.type)
        reads = bool(facts.reads) or any(graph.value(v).is_ref for v in op.inputs)
        reads |= op.type in effects.FUNCTIONAL and variables.touches(graph, op_id)
        if reads or any(graph.value(v).op in learned for v in op.inputs):
            learned.add(op_id)
            if any(phases.activation[v] and graph.value(v).is_tensor for v in op.outputs):
                found.append(op_id)
    return found


def derived(
    graph: Graph,
    phases: Phases,
    late: Sequence[OpId],
    gradients: frozenset[OpId],
    number: Mapping[OpId, int],
) -> dict[OpId, int]:
    """Return the late operations that compute from forward values alone, for gradients to read."""
    found: dict[OpId, int] = {}
    for op_id in late:
        op = graph.op(op_id)
        if op_id in gradients or effects.takes_shape(op.type):
            continue
        if not any(phases.activation[v] for v in op.outputs):
            continue
        sources = [graph.value(v).op for v in op.inputs]
        if any(source in gradients for source in sources):
            continue
        known = [found.get(source, number.get(source, 0)) for source in sources]
        if max(known, default=0):
            found[op_id] = max(known)
    read: set[OpId] = set()
    for op_id in reversed(list(found)):
        readers = {use.op for v in graph.op(op_id).outputs for use in graph.uses(v)}
        if readers & read or not readers.isdisjoint(gradients):
            read.add(op_id)
    return {op: at for op, at in found.items() if op in read}


def line(graph: Graph, ops: Sequence[OpId], number: Mapping[OpId, int]) -> Line:
    """Lay out the forward phase.

    Args:
        graph: the graph.
        ops: the forward operations, in order.
        number: of these, and of what belongs to them.
    """
    last: dict[ValueId, int] = {}
    for op_id in number:
        for value in graph.op(op_id).outputs:
            if not graph.value(value).is_tensor:
                continue
            readers = [
                number[use.op]
                for use in graph.uses(value)
                if use.op in number and not effects.takes_shape(graph.op(use.op).type)
            ]
            if readers:
                last[value] = max(readers)
    ends: dict[int, list[ValueId]] = {}
    alive: dict[ValueId, None] = {}
    across: list[tuple[ValueId, ...] | None] = [()]
    born: dict[int, list[ValueId]] = {}
    for value, end in last.items():
        if end > number[graph.value(value).op]:
            born.setdefault(number[graph.value(value).op], []).append(value)
            ends.setdefault(end, []).append(value)
    for place in range(1, len(ops) + 1):
        for value in ends.get(place, ()):
            del alive[value]
        alive.update(dict.fromkeys(born.get(place, ())))
        across.append(tuple(sorted(alive)) if len(alive) <= _MOST_VALUES else None)
    return Line(tuple(ops), number, last, tuple(across))


def root(graph: Graph, value: ValueId) -> ValueId:
    """Return the value whose buffer a value shares, through reshapes and other views."""
    while True:
        op = graph.producer(value)
        if not (effects.of(op.type).view and op.inputs) or effects.of(op.type).reads:
            return value
        value = op.inputs[0]
