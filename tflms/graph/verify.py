"""Checks the invariants of the IR; a failure shows the equation and its neighbours."""

from __future__ import annotations

from tflms.errors import InvariantError
from tflms.graph import effects, order, text, variables
from tflms.graph.erase import COPIES, original
from tflms.graph.ir import Graph, Op, OpId, Use


def verify(graph: Graph) -> None:
    """Check invariants I1 to I8.

    I1 one producer per value and unique names; I2 uses mirror inputs; I3 no cycle over read and
    control edges; I4 copies keep dtype and shape and read plain tensors only; I5 the user's
    operations are all there; I6 nothing inserted reads or writes a variable in its own right;
    I7 random and stateful operations are not repeated; I8 what is inserted stays in the loop frame
    of what it copies.

    Raises:
        InvariantError: one of them does not hold.
    """
    names: dict[str, OpId] = {}
    # Sets, as a learning rate or a train op has thousands of neighbours.
    read = {(v, use) for op in graph.ops() for v in op.outputs for use in graph.value(v).uses}
    waiting = {(op.id, user) for op in graph.ops() for user in graph.control_users(op.id)}
    for op in graph.ops():
        if names.setdefault(op.name, op.id) != op.id or graph.find(op.name) != op.id:
            _fail(graph, op, "has a name that is not its own (I1)")
        for index, value in enumerate(op.outputs):
            v = graph.value(value)
            if v.op != op.id or v.index != index:
                _fail(graph, op, f"does not make its output {index} (I1)")
            for use in v.uses:
                if not graph.has(use.op) or graph.op(use.op).inputs[use.slot] != value:
                    _fail(graph, op, f"has a use of output {index} that reads otherwise (I2)")
        for slot, value in enumerate(op.inputs):
            if not graph.has(graph.value(value).op):
                _fail(graph, op, f"reads slot {slot} of an operation that is gone (I1)")
            if (value, Use(op.id, slot)) not in read:
                _fail(graph, op, f"reads slot {slot} unknown to its producer (I2)")
        for before in op.controls:
            if (before, op.id) not in waiting:
                _fail(graph, op, "waits for an operation that does not know of it (I2)")
        if op.role:
            _verify_inserted(graph, op)
    order.topological(graph)  # I3
    for op_id in range(graph.original_ops):
        if not graph.has(op_id):
            raise InvariantError(f"the user's operation {op_id} is gone (I5)")


def _verify_inserted(graph: Graph, op: Op) -> None:
    if op.role in COPIES:
        source, copy = graph.value(op.inputs[0]), graph.value(op.outputs[0])
        if source.dtype != copy.dtype or source.shape != copy.shape:
            _fail(graph, op, "changes the type of what it copies (I4)")
        if not source.is_tensor:
            _fail(graph, op, "copies what is no plain tensor (I4)")
        if op.frame != graph.op(graph.value(original(graph, source.id)).op).frame:
            _fail(graph, op, "left the loop frame of what it copies (I8)")
    elif op.repeats:
        facts = effects.of(op.type)
        if not facts.pure or op.stateful:
            _fail(graph, op, "repeats an operation that must run once (I7)")
        if facts.reads or facts.writes or variables.touches(graph, op.id):
            _fail(graph, op, "touches a variable (I6)")
        if op.origin is None or op.frame != graph.op(op.origin).frame:
            _fail(graph, op, "left the loop frame of what it repeats (I8)")
    for value in op.outputs:
        for use in graph.value(value).uses:
            if graph.op(use.op).frame != op.frame and graph.op(use.op).type not in (
                "Exit",
                "RefExit",
            ):
                _fail(graph, op, "is read in another loop frame (I8)")


def _fail(graph: Graph, op: Op, what: str) -> None:
    raise InvariantError(f"{op.name!r} {what}\n{text.excerpt(graph, op.id)}")
