"""Knows which sums and products of the forward phase round by who else reads their operands.

A sum of three values and more begins with an operand that nobody else holds when it runs. Where
the backward phase reads another copy of an operand, the sum begins elsewhere, and rounds otherwise.
Grappler makes such sums of sums in a row, too. So their operands stay as they are: they are kept.
Three constant factors in a row are multiplied with each other in an order that depends on what
else is in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable

from tflms.graph.ir import Graph, OpId, ValueId
from tflms.planning import kernels

_MANY = 3  # operands of one shape, or constant factors


def held(graph: Graph, ops: Iterable[OpId]) -> tuple[set[OpId], set[ValueId]]:
    """Return what must not run again, for sums of several values to round as before.

    Args:
        graph: the graph.
        ops: its forward operations.

    Returns:
        operations that may not run again, and values that must be kept.
    """
    within = set(ops)
    sums: set[OpId] = set()
    values: set[ValueId] = set()
    for row in _rows_of_sums(graph, within):
        operands = [v for op in row for v in graph.op(op).inputs if graph.value(v).op not in row]
        shapes = [graph.value(v).shape for v in operands]
        if max(map(shapes.count, shapes)) >= _MANY:
            sums |= row
            values.update(operands)
    once = set(sums)
    for value in values:
        readers = {op.id for op in kernels.live_readers(graph, value)}
        if readers <= within:  # nobody holds it for the way back: nor may a copy of it do
            once |= readers
    return once, values


def _rows_of_sums(graph: Graph, within: set[OpId]) -> list[set[OpId]]:
    """Sums that Grappler may join: each is the only reader of the one before."""
    row_of: dict[OpId, set[OpId]] = {}
    for op in sorted(within):
        if graph.op(op).type not in kernels.SUMS:
            continue
        row = row_of.setdefault(op, {op})
        readers = {reader.id for reader in kernels.live_readers(graph, graph.op(op).outputs[0])}
        if len(readers) == 1:
            (reader,) = readers
            if reader in within and graph.op(reader).type in kernels.SUMS:
                row |= row_of.get(reader, {reader})
                row_of.update(dict.fromkeys(row, row))
    return list({min(row): row for row in row_of.values()}.values())


def unsettled(graph: Graph, ops: Iterable[OpId]) -> OpId | None:
    """Return a product with more constant factors in a row than TensorFlow joins in one way."""
    return next((op for op in ops if kernels.constant_factors(graph, op) >= _MANY), None)
