"""Finds the stretches of a planned order in which a value's buffer is not in use."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.planning import kernels
from tflms.planning.allocator import rounded
from tflms.planning.auto import Gap
from tflms.planning.cost import Sizes


class Views:
    """Which values show one buffer: parking one of them frees it only when no other is read."""

    def __init__(self, graph: Graph, order: Sequence[OpId]) -> None:
        self._graph = graph
        self._home: dict[ValueId, ValueId] = {}
        self._members: dict[ValueId, list[ValueId]] = {}
        for op_id in order:
            op = graph.op(op_id)
            view = effects.of(op.type).view and bool(op.inputs)
            for value in op.outputs:
                home = self._home.get(op.inputs[0], op.inputs[0]) if view else value
                self._home[value] = home
                self._members.setdefault(home, []).append(value)

    def last_use_of_others(self, value: ValueId, place: dict[OpId, int]) -> int:
        """The last place that reads the buffer by another way than through the value; or -1."""
        graph = self._graph
        members = self._members[self._home[value]]
        if len(members) == 1:
            return -1
        through = {value}
        for member in members:  # in order, so a view comes behind what it shows
            if set(graph.producer(member).inputs[:1]) & through:
                through.add(member)
        return max(
            (
                place[use.op]
                for member in members
                if member not in through
                for use in graph.uses(member)
                if use.op in place and not through & set(graph.op(use.op).outputs)
            ),
            default=-1,
        )


def all_gaps(
    graph: Graph,
    order: Sequence[OpId],
    gates: npt.NDArray[np.bool_],
    values: Collection[ValueId],
    weights: Sizes,
) -> dict[ValueId, tuple[Gap, ...]]:
    """The gaps of each of some values that has any, in the order in which they are made."""
    place = {op: i for i, op in enumerate(order)}
    views = Views(graph, order)
    found: dict[ValueId, tuple[Gap, ...]] = {}
    for op_id in order:
        for value in graph.op(op_id).outputs:
            if value in values:
                held = max(place[op_id], views.last_use_of_others(value, place))
                nbytes = rounded(weights.nbytes[value])
                if gaps := gaps_of(graph, nbytes, place, gates, value, held):
                    found[value] = gaps
    return found


def gaps_of(
    graph: Graph,
    nbytes: int,
    place: dict[OpId, int],
    in_chain: npt.NDArray[np.bool_],
    value: ValueId,
    held: int,
) -> tuple[Gap, ...]:
    """The gaps between uses of a value; views of it extend the use that makes them.

    ``held`` is the place up to which its buffer is in use anyway.
    """
    uses = [
        u
        for u in graph.uses(value)
        if u.op in place and not kernels.reads_shape_only(graph, graph.op(u.op))
    ]
    ends = {u.op: _last_use(graph, place, u.op) for u in uses}
    starts = {u.op: _first_need(graph, place, u.op) for u in uses}
    events = sorted(uses, key=lambda u: (starts[u.op], u.slot))
    found: list[Gap] = []
    for use in events:
        at = starts[use.op]
        ours = use.op < graph.original_ops or graph.op(use.op).role == "seed"
        if at > held + 1 and in_chain[held + 1 : at].any() and ours:
            found.append(Gap(value, nbytes, held, at, (use,)))
        elif found:
            last = found[-1]
            found[-1] = Gap(last.value, last.nbytes, last.after, last.until, (*last.uses, use))
        held = max(held, ends[use.op])
    return tuple(found)


def _first_need(graph: Graph, place: dict[OpId, int], op_id: OpId) -> int:
    """The place from which on an operation needs its input: a seed, from what it waits for on."""
    op = graph.op(op_id)
    return place[op.controls[0]] if op.role == "seed" else place[op_id]


def _last_use(graph: Graph, place: dict[OpId, int], op_id: OpId) -> int:
    """The place at which an operation, and whatever reads a view that it makes, has read."""
    last, stack, seen = place[op_id], [op_id], {op_id}
    while stack:
        op = graph.op(stack.pop())
        if not effects.of(op.type).view:
            continue
        for value in op.outputs:
            for use in graph.uses(value):
                if use.op in place and use.op not in seen:
                    seen.add(use.op)
                    stack.append(use.op)
                    last = max(last, place[use.op])
    return last
