"""The text form of a graph, one equation a line: ``y = Relu(x) : f32[8,64] @device after a, b``.

An operation's name is also the name of its first output; other outputs are ``name:slot``. Behind
the arguments stand, each only where there is something to say: the outputs' types, the device,
control edges, the loop frame, colocation, ``stateful``, and what an inserted operation is for.
"""

from __future__ import annotations

import re

from tflms.errors import GraphError
from tflms.graph.ir import Graph, Op, OpId, Shape, Use, ValueId

_HEAD = re.compile(r"(?P<name>\S+) = (?P<type>\w+)\((?P<inputs>[^()]*)\)(?P<rest>.*)")
_PART = re.compile(r" (:|after|frame|colocated|stateful|role|origin|entering)(?= |$)| @")
_TYPE = re.compile(r"(?P<dtype>\w+\*?)\[(?P<dims>[^\]]*)\]")
_USE = re.compile(r"(?P<op>.+)\[(?P<slot>\d+)\]")


def dump(graph: Graph) -> str:
    """Return the whole graph as text, in id order; ``parse`` reads it back."""
    return "\n".join(line(graph, op) for op in graph.ops()) + "\n"


def line(graph: Graph, op: Op) -> str:
    """Return one operation's equation."""
    text = f"{op.name} = {op.type}({', '.join(map(graph.value_name, op.inputs))})"
    if op.outputs:
        text += " : " + ", ".join(_type(graph, v) for v in op.outputs)
    if op.device:
        text += f" @{op.device}"
    if op.controls:
        text += " after " + ", ".join(graph.op(c).name for c in op.controls)
    if op.frame:
        text += f" frame {op.frame}"
    if op.colocation:
        text += " colocated " + ", ".join(op.colocation)
    if op.stateful:
        text += " stateful"
    if op.role:
        text += f" role {op.role}"
    if op.origin is not None:
        text += f" origin {graph.op(op.origin).name}"
    if "frame_name" in op.attrs:
        text += f" entering {op.attrs['frame_name']}"
    return text


def _type(graph: Graph, value: ValueId) -> str:
    v = graph.value(value)
    dims = "..." if v.shape is None else ",".join("?" if d is None else str(d) for d in v.shape)
    return f"{v.dtype}[{dims}]"


def parse(text: str) -> Graph:
    """Build a graph from its text; lines may name operations that come later.

    Raises:
        GraphError: a line cannot be read, or names what is not there.
    """
    graph = Graph()
    pending: list[tuple[Op, str, dict[str, str]]] = []
    lines = [entry.strip() for entry in text.splitlines()]
    for entry in lines:
        if not entry or entry.startswith("#"):
            continue
        match = _HEAD.fullmatch(entry)
        if match is None:
            raise GraphError(f"cannot read {entry!r}; write `name = Type(inputs) : f32[2,3]`")
        parts = _parts(entry, match.group("rest"))
        op = graph.add(
            match.group("name"),
            match.group("type"),
            outputs=[_parse_type(t) for t in _TYPE.finditer(parts.get(":", ""))],
            device=parts.get("@", ""),
            stateful="stateful" in parts,
            frame=parts.get("frame", ""),
            colocation=tuple(_names(parts.get("colocated", ""))),
            role=parts.get("role", ""),
            attrs={"frame_name": parts["entering"]} if "entering" in parts else None,
        )
        pending.append((op, match.group("inputs"), parts))
    for op, inputs, parts in pending:
        graph.connect(
            op.id,
            inputs=[value_named(graph, name) for name in _names(inputs)],
            controls=[op_named(graph, name) for name in _names(parts.get("after", ""))],
        )
        if "origin" in parts:
            op.origin = op_named(graph, parts["origin"])
    graph.seal()
    return graph


def _parts(entry: str, rest: str) -> dict[str, str]:
    pieces = _PART.split(rest)
    if pieces[0].strip():
        raise GraphError(f"cannot read {pieces[0].strip()!r} in {entry!r}")
    return {key or "@": body.strip() for key, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parse_type(match: re.Match[str]) -> tuple[str, Shape | None]:
    dims = match.group("dims")
    if dims == "...":
        return match.group("dtype"), None
    return match.group("dtype"), tuple(None if d == "?" else int(d) for d in _names(dims))


def op_named(graph: Graph, name: str) -> OpId:
    """Return the operation of that name.

    Raises:
        GraphError: there is none.
    """
    found = graph.find(name)
    if found is None:
        raise GraphError(f"there is no operation {name!r} in the graph")
    return found


def value_named(graph: Graph, name: str) -> ValueId:
    """Return the value called ``op`` or ``op:slot``.

    Raises:
        GraphError: there is none.
    """
    found = graph.find_value(name)
    if found is None:
        raise GraphError(f"there is no value {name!r} in the graph")
    return found


def use_named(graph: Graph, name: str) -> Use:
    """Return the input slot written ``op[slot]``.

    Raises:
        GraphError: there is none.
    """
    match = _USE.fullmatch(name)
    if match is None:
        raise GraphError(f"{name!r} is no input slot; write it as op[slot]")
    use = Use(op_named(graph, match.group("op")), int(match.group("slot")))
    if use.slot >= len(graph.op(use.op).inputs):
        raise GraphError(f"{match.group('op')!r} has no input slot {use.slot}")
    return use


def excerpt(graph: Graph, op: OpId, around: int = 2) -> str:
    """Return an operation's equation between its neighbours, marked, for error messages."""
    shown = [o for o in graph.ops() if abs(o.id - op) <= around]
    return "\n".join(
        f"{'>' if o.id == op else ' '} {o.id:5d}  {line(graph, o)}"
        + ("      <- here" if o.id == op else "")
        for o in shown
    )
