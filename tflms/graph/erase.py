"""Erasure, the master property: contracting what was inserted gives back the original graph."""

from __future__ import annotations

from dataclasses import dataclass

from tflms.errors import InvariantError
from tflms.graph import text
from tflms.graph.ir import Graph, OpId, ValueId

COPIES = frozenset({"swap_out", "swap_in", "identity", "seed", "own"})  # hand their input on


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of all user operations: what each input slot reads and what each waits for."""

    inputs: tuple[tuple[ValueId, ...], ...]
    controls: tuple[tuple[OpId, ...], ...]


def edges(graph: Graph) -> Edges:
    """Take down the edges of the user's operations as they are now."""
    ops = [graph.op(i) for i in range(graph.original_ops)]
    return Edges(tuple(tuple(op.inputs) for op in ops), tuple(tuple(op.controls) for op in ops))


def original(graph: Graph, value: ValueId) -> ValueId:
    """Return the user's value that a value equals: through copies, and from clone to origin."""
    while True:
        v = graph.value(value)
        op = graph.op(v.op)
        if op.role in COPIES:
            value = op.inputs[0]
        elif op.repeats:
            assert op.origin is not None
            value = graph.op(op.origin).outputs[v.index]
        else:
            return value


def added_controls(graph: Graph) -> dict[OpId, set[OpId]]:
    """Return, per user operation, the control edges that were put on it since the seal."""
    found: dict[OpId, set[OpId]] = {}
    for edit in graph.journal:
        if edit.other is None or edit.op >= graph.original_ops:
            continue
        if edit.kind == "control":
            found.setdefault(edit.op, set()).add(edit.other)
        elif edit.kind == "uncontrol":
            found.setdefault(edit.op, set()).discard(edit.other)
    return found


def erase(graph: Graph) -> Edges:
    """Contract inserted copies, unify clones with their origins, drop inserted control edges."""
    added = added_controls(graph)
    ops = [graph.op(i) for i in range(graph.original_ops)]
    return Edges(
        tuple(tuple(original(graph, v) for v in op.inputs) for op in ops),
        tuple(tuple(c for c in op.controls if c not in added.get(op.id, ())) for op in ops),
    )


def check(graph: Graph, before: Edges) -> None:
    """Check that the graph erases to what it was, and that each clone repeats its origin.

    Raises:
        InvariantError: it does not; the message shows the first operation that differs.
    """
    after = erase(graph)
    for op in range(graph.original_ops):
        if after.inputs[op] != before.inputs[op] or after.controls[op] != before.controls[op]:
            raise InvariantError(
                f"{graph.op(op).name!r} does not erase to what it was\n"
                + text.excerpt(graph, OpId(op))
            )
    for node in graph.ops():
        if node.repeats:
            assert node.origin is not None
            twin = graph.op(node.origin)
            if node.type != twin.type or [original(graph, v) for v in node.inputs] != list(
                before.inputs[node.origin]
            ):
                raise InvariantError(
                    f"{node.name!r} does not repeat {twin.name!r}\n" + text.excerpt(graph, node.id)
                )
