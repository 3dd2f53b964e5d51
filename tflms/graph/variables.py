"""Which operation owns, reads or overwrites which variable: the update edges of variable semantics.

A variable lives in the operation that makes its handle (VarHandleOp, a captured resource) or its
reference (VariableV2). An update edge leads from an operation that overwrites a variable to that
owner. It closes the training loop and orders nothing within a step (arXiv 1807.02037, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId

Action = Literal["read", "update", "control"]


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge with what its target does with it; ``value`` is None for control edges."""

    source: OpId
    target: OpId
    action: Action
    value: ValueId | None = None
    slot: int = -1


def owner(graph: Graph, value: ValueId) -> OpId | None:
    """Return the operation that owns the variable behind a handle or reference, or None.

    Copies of handles (Identity, Enter, Switch) are seen through.
    """
    seen: set[ValueId] = set()
    while value not in seen:
        seen.add(value)
        v = graph.value(value)
        if not (v.is_ref or v.dtype == "resource"):
            return None
        op = graph.op(v.op)
        if not op.inputs or effects.owns_variable(op.type):
            return op.id
        value = op.inputs[0]
    return None


def touches(graph: Graph, op: OpId) -> bool:
    """Tell whether an operation takes a handle of, or a reference to, a variable."""
    inputs = (graph.value(v) for v in graph.op(op).inputs)
    return any(v.is_ref or v.dtype == "resource" for v in inputs)


def edges(graph: Graph) -> list[Edge]:
    """Return all edges by target: read and control edges as they stand, then update edges."""
    found: list[Edge] = []
    for op in graph.ops():
        found += [
            Edge(graph.value(value).op, op.id, "read", value, slot)
            for slot, value in enumerate(op.inputs)
        ]
        found += [Edge(before, op.id, "control") for before in op.controls]
    found += updates(graph)
    return found


def updates(graph: Graph) -> list[Edge]:
    """Return the update edges: from what overwrites a variable to the variable's owner."""
    found: list[Edge] = []
    for op in graph.ops():
        for slot in effects.of(op.type).writes:
            if slot >= len(op.inputs):
                continue
            home = owner(graph, op.inputs[slot])
            if home is not None:
                found.append(Edge(op.id, home, "update", op.inputs[slot], slot))
    return found


def accesses(graph: Graph) -> dict[OpId, tuple[list[OpId], list[OpId]]]:
    """Return, per owner, the operations that read its variable and those that overwrite it."""
    found: dict[OpId, tuple[list[OpId], list[OpId]]] = {}
    for op in graph.ops():
        facts = effects.of(op.type)
        for slot, value in enumerate(op.inputs):
            home = owner(graph, value)
            if home is None or home == op.id:
                continue
            readers, writers = found.setdefault(home, ([], []))
            if slot in facts.writes:
                writers.append(op.id)
            else:
                readers.append(op.id)
    return found
