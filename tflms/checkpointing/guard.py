"""Keeps TensorFlow from fusing or regrouping more than before the rewrite: numbers would change.

Grappler turns a product and what follows into one kernel (on CPU and GPU), and products or sums in
a row into others with their constants together (everywhere), where nobody else reads what lies
between; the result rounds otherwise. A late reader prevents it. Where a rewrite takes that reader
away, a guard takes its place: for the user's own operations a copy that the first recomputation
waits for, for clones the attribute that keeps them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tflms.graph import effects
from tflms.graph.erase import COPIES, added_controls, original
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.planning import kernels
from tflms.planning.cost import device_kind
from tflms.rewriting.engine import Application, Engine

_FUSED_ON = ("", "CPU", "GPU")
Readers = dict[ValueId, set[OpId]]


def readers(graph: Graph, step: Sequence[bool]) -> Readers:
    """Return which of the user's operations read each value in the step as the user made it.

    As Grappler sees it: identities are looked through; what leads nowhere, as the gradient of a
    constant does, and what reads a shape that is known do not count. Works on any rewritten graph.

    Args:
        graph: the graph.
        step: per operation of the user's, whether the step runs it.
    """
    return _readers(graph, step, plain=True)


def run(engine: Engine, before: Readers, step: Sequence[bool], ops: Iterable[OpId]) -> int:
    """Guard what has lost all readers but one; return how many copies that took.

    Args:
        engine: for the rewritten graph.
        before: what read each value in the step as the user made it.
        step: per operation of the user's, whether the step runs it.
        ops: those of the user's whose results are looked at.
    """
    graph = engine.graph
    seeds = [op.id for op in graph.ops() if op.role == "seed"]
    if not seeds:
        return 0
    first = min(seeds, key=engine.place)
    now = _readers(graph, step, plain=False)
    count = 0
    for value in (v for op in ops for v in graph.op(op).outputs):
        if _lost(graph, value, before, now) and _merges(graph, value, now[value]):
            engine.apply(Application("recompute_guard", {"v": value, "s": first}))
            count += 1
    return count


def alone(graph: Graph, step: Sequence[bool]) -> set[OpId]:
    """Return the clones that must stay as they are: what they repeat has several readers, they one.

    Works on any rewritten graph, one that was rewritten by a saved plan too.
    """
    clones = [op for op in graph.ops() if op.role == "clone" and not effects.takes_shape(op.type)]
    if not clones:
        return set()
    before, now = readers(graph, step), _readers(graph, step, plain=False)
    return {op.id for op in clones if any(_lost(graph, v, before, now) for v in op.outputs)}


def _lost(graph: Graph, value: ValueId, before: Readers, now: Readers) -> bool:
    """Tell whether a value had several readers, and now has one that its maker may pull in."""
    remaining = now.get(value, set())
    if graph.producer(value).type == "Identity":
        return False
    if len(remaining) != 1 or len(before.get(original(graph, value), ())) < 2:
        return False
    (reader,) = (graph.op(op) for op in remaining)
    return reader.type not in kernels.HEADS and reader.role not in ("seed", "identity")


def _merges(graph: Graph, value: ValueId, remaining: set[OpId]) -> bool:
    """Tell whether Grappler merges such a value's maker and reader on their device."""
    maker = graph.producer(value)
    if device_kind(maker.device) in _FUSED_ON:
        return True
    types = {maker.type, *(graph.op(op).type for op in remaining)}
    return types <= kernels.REGROUPED


def _readers(graph: Graph, step: Sequence[bool], *, plain: bool) -> Readers:
    """Return what reads each value: in the step as the user made it, or in the graph as it is."""
    ops = [op for op in graph.ops() if (not plain if op.role else step[op.id])]
    added = added_controls(graph) if plain else {}
    waited_for = {c for op in ops for c in op.controls if c not in added.get(op.id, ())}
    inputs = {op.id: [original(graph, v) if plain else v for v in op.inputs] for op in ops}
    read_by: Readers = {}
    for op in ops:
        for value in inputs[op.id]:
            read_by.setdefault(value, set()).add(op.id)
    leading: set[OpId] = set()  # what something reads in the end, or what is done for good
    stack = [
        op.id
        for op in ops
        if op.stateful
        or op.role in COPIES
        or not (op.id in waited_for or any(v in read_by for v in op.outputs))
    ]
    while stack:
        op_id = stack.pop()
        if op_id not in leading:
            leading.add(op_id)
            stack += (graph.value(v).op for v in inputs.get(op_id, ()))
    return {value: _final(graph, value, read_by) & leading for value in read_by}


def _final(graph: Graph, value: ValueId, read_by: Readers) -> set[OpId]:
    """What reads a value, through the user's identities, which Grappler takes out."""
    found: set[OpId] = set()
    stack = [value]
    while stack:
        for op_id in read_by.get(stack.pop(), ()):
            op = graph.op(op_id)
            if kernels.reads_shape_only(graph, op):
                continue
            if op.type == "Identity" and op.role in ("", "clone") and op.outputs[0] in read_by:
                stack.append(op.outputs[0])
            else:
                found.add(op_id)
    return found
