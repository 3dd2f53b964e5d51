"""Finds pairs of backward operations of which the one that lets go of an activation runs first.

A layer's gradient is read by two operations: one makes the weight's gradient and reads the
activation for the last time, the other makes the gradient for the layer before. The executor runs
them as it likes; with the first one first, activation and new gradient never meet.
"""

from __future__ import annotations

from collections.abc import Sequence

from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases
from tflms.rewriting.engine import Application, Engine
from tflms.strategies.swap import Swapped


def pairs(graph: Graph, phases: Phases) -> list[tuple[OpId, OpId]]:
    """Return (reader, sibling) pairs: the reader ends soon, the sibling goes on backward.

    The reader reads an activation of the forward phase; its way to the end of the step is shorter
    than its sibling's, and whatever needs the sibling needs the reader too.
    """
    height = _heights(graph, phases)
    found: list[tuple[OpId, OpId]] = []
    for op in phases.order:
        if not phases.late(op):
            continue
        node = graph.op(op)
        activations = [v for v in node.inputs if _parked(graph, phases, v)]
        if not activations:
            continue
        if _grows(graph, node.outputs, activations) or not _settled(graph, op):
            continue
        for shared in node.inputs:
            if shared in activations or not _gradient(graph, phases, shared):
                continue
            found.extend(
                (op, use.op)
                for use in graph.uses(shared)
                if use.op != op
                and phases.late(use.op)
                and height[use.op] > height[op]
                and graph.op(use.op).frame == node.frame == ""
                and _settled(graph, use.op)
                and not phases.needed_by[use.op] & ~phases.needed_by[op]
            )
    return list(dict.fromkeys(found))


_HARMLESS = frozenset(["Mul", "Add", "AddV2", "AddN", "Sub", "Reshape", "Identity", "Cast"])


def _settled(graph: Graph, op_id: OpId) -> bool:
    """Tell whether a control edge at an operation leaves TensorFlow's kernels as they are.

    Grappler draws a common factor out of sums of products, joins sums, and so on, where no
    control edge touches them: the gradient of ``x * sigmoid(x)`` would round otherwise. Products
    it merges with a bias or an activation, not with the sums that gradients go into.
    """
    readers = (r for r in graph.reader_types(op_id) if r not in _HARMLESS)
    return effects.signals(graph.op(op_id).type, readers)


def _grows(graph: Graph, made: Sequence[ValueId], read: Sequence[ValueId]) -> bool:
    """Tell whether what is made is known to be larger than what is let go of."""
    if any(None in (graph.value(v).shape or (None,)) for v in read):
        return False
    largest = max(graph.value(v).nbytes() or 0 for v in read)
    return any((graph.value(v).nbytes() or 0) > largest for v in made)


def _parked(graph: Graph, phases: Phases, value: ValueId) -> bool:
    return phases.activation[value] and phases.forward[graph.value(value).op]


def _gradient(graph: Graph, phases: Phases, value: ValueId) -> bool:
    v = graph.value(value)
    return phases.activation[value] and phases.late(v.op) and v.dtype[0] in "fbc" and bool(v.shape)


def _heights(graph: Graph, phases: Phases) -> list[int]:
    """Longest way to the end of the step over read edges alone.

    ``tf.gradients`` ties the gradients of one operation together by control edges, which say
    nothing about where each of them goes.
    """
    height = [0] * graph.size
    for op in reversed(phases.order):
        if phases.step[op]:
            readers = (u.op for v in graph.op(op).outputs for u in graph.uses(v))
            height[op] = 1 + max((height[r] for r in readers if phases.step[r]), default=-1)
    return height


def run(engine: Engine, swapped: Sequence[Swapped], candidates: Sequence[tuple[OpId, OpId]]) -> int:
    """Propose ``release_first`` where the reader reads a swapped-in value; return how many."""
    siblings: dict[OpId, list[OpId]] = {}
    for reader, sibling in candidates:
        siblings.setdefault(reader, []).append(sibling)
    count = 0
    for one in swapped:
        for swap_in, uses in one.groups:
            value = engine.graph.op(swap_in).outputs[0]
            for reader in dict.fromkeys(use.op for use in uses):
                for sibling in siblings.get(reader, ()):
                    bindings = {"w": value, "reader": reader, "sibling": sibling}
                    engine.apply(Application("release_first", bindings))
                    count += 1
    return count
