"""Finds what all gradients of a step pass on their way from the loss to the first layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from tflms.errors import GraphError
from tflms.graph import effects
from tflms.graph.ir import Graph, OpId

_ROOT = OpId(-1)


@dataclass(frozen=True, slots=True)
class Spine:
    """The operations that every gradient of an early layer passes, from the loss down.

    Attributes:
        ops: these operations, in order.
        place: per gradient operation, the last place on the spine that it comes after, or its own.
        gradients: all operations that compute with gradients.
        lowest: the first interval of the forward phase that a gradient reads.
    """

    ops: tuple[OpId, ...]
    place: Mapping[OpId, int]
    gradients: frozenset[OpId]
    lowest: int

    def holds(self, op: OpId) -> bool:
        """Tell whether an operation is part of the spine."""
        place = self.place.get(op)
        return place is not None and self.ops[place] == op

    def before(self, op: OpId) -> int | None:
        """Return the last place on the spine that an operation comes after; -1 for none.

        None for what is no gradient, and for gradients that hang on no place of the spine.
        """
        place = self.place.get(op)
        if place is None:
            return None
        return place - 1 if self.ops[place] == op else place


def find_spine(graph: Graph, late: Sequence[OpId], index: Mapping[OpId, int]) -> Spine:
    """Find the spine of the backward phase.

    What depends on a late reader of the last layers and itself reads the first layers carries
    gradients. So the operations that carry them are told from those that do not, such as moving
    averages, metrics, or derivatives that depend on forward values alone.

    Args:
        graph: the graph.
        late: the operations behind the forward phase, in order.
        index: per forward operation, how far along it is.

    Raises:
        GraphError: nothing reads first layers after last ones, or the gradients of the first
            layers have nothing in common.
    """
    reads: dict[OpId, tuple[int, int]] = {}
    newest: dict[OpId, int] = {}
    span, top = -1, -1
    behind = set(late)
    for op_id in late:
        node = graph.op(op_id)
        found = [index[graph.value(v).op] for v in node.inputs if graph.value(v).op in index]
        if effects.takes_shape(node.type):
            found = []
        before = [newest[p] for p in graph.predecessors(op_id) if p in behind]
        newest[op_id] = max([*found, *before], default=-1)
        if found:
            reads[op_id] = (min(found), max(found))
            if newest[op_id] - min(found) > span:
                span, top = newest[op_id] - min(found), newest[op_id]
    if span <= 0:
        raise GraphError(
            "no operation behind the loss reads an early activation after a late one: there are no "
            "gradients to recompute for"
        )
    gradients = [op for op in late if newest[op] >= top]
    flow = nx.DiGraph()
    carried = set(gradients)
    for op in gradients:
        sources = [p for p in graph.predecessors(op) if p in carried]
        flow.add_edges_from((p, op) for p in sources or [_ROOT])
    dominator = nx.immediate_dominators(flow, _ROOT)
    depth = {_ROOT: 0}
    for op in gradients:
        depth[op] = depth[dominator[op]] + 1
    lowest = min(reads[op][0] for op in gradients if op in reads)
    deepest = [op for op in gradients if op in reads and reads[op][0] == lowest]
    end = deepest[0]
    for op in deepest[1:]:
        end = _common(dominator, depth, end, op)
    # All of them come after that; the one that most lies before leads on to the first gradient.
    end = max(deepest, key=lambda op: (depth[op], -op)) if end != _ROOT else end
    spine: list[OpId] = []
    while end != _ROOT:
        spine.append(end)
        end = dominator[end]
    spine.reverse()
    if not spine:
        raise GraphError(
            "the gradients of the first layers have no operation in common that they all pass; "
            "this step is no chain of stages"
        )
    number = {op: i for i, op in enumerate(spine)}
    place: dict[OpId, int] = {}
    for op in gradients:
        here = number.get(op, place.get(dominator[op]))
        if here is not None:
            place[op] = here
    return Spine(tuple(spine), place, frozenset(gradients), lowest)


def _common(dominator: Mapping[OpId, OpId], depth: Mapping[OpId, int], a: OpId, b: OpId) -> OpId:
    while a != b:
        if depth[a] < depth[b]:
            a, b = b, a
        a = dominator[a]
    return a
