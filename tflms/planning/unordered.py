"""Predicts what a step may need where nothing fixes its order, or where some stays open."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tflms.graph.ir import Graph, OpId
from tflms.planning.allocator import least_capacity, packs
from tflms.planning.executor import orders_left, possible_orders
from tflms.planning.simulate import Replay

# Of the limit: orders that hardly ever come may take a part of what is left for holes, 3 %.
_RARELY_PERCENT = 102


@dataclass(frozen=True, slots=True)
class Unordered:
    """What a step may need as it is.

    Attributes:
        most_bytes: the highest peak over the orders in which the executor may run it.
        fits: whether all of them find room in the device, holes between buffers included.
    """

    most_bytes: int
    fits: bool


def unordered(
    graph: Graph, replay: Replay, within: set[OpId], capacity: int, *, waste: int
) -> Unordered:
    """Replay a step in all orders that the executor may take, in a device of that capacity.

    Args:
        graph: the graph as it is.
        replay: of this very graph.
        within: the operations that run.
        capacity: bytes of the device.
        waste: the rest of a hole from which on its allocator splits it, see ``overflow``.
    """
    orders = possible_orders(graph, within)
    most = max(replay.run(order).peak_bytes for order in orders)
    fits = most <= capacity
    for order in orders if fits else ():
        asked = replay.events(order)
        fits = fits and packs(asked.persistent, asked.events, capacity, waste=waste)
    return Unordered(most, fits)


def enough_bytes(graph: Graph, replay: Replay, within: set[OpId], *, waste: int) -> int:
    """Return the bytes of a device in which a step fits in all orders; arguments as before."""
    orders = possible_orders(graph, within)
    asked = [replay.events(order) for order in orders]
    found, higher = 0, max(replay.run(order).peak_bytes for order in orders)
    while higher > found:  # what fits in one device need not fit in a larger one
        found = higher
        higher = max(
            least_capacity(one.persistent, one.events, found, waste=waste) for one in asked
        )
    return found


def over(
    graph: Graph,
    replay: Replay,
    within: set[OpId],
    planned: Sequence[OpId],
    limit: int,
    merged: Mapping[OpId, OpId],
) -> int | None:
    """Return the peak in an order that a step's edges leave to the executor, if one is too high.

    No edge may touch some operations: they run as soon as they can, or when nothing else is ready,
    or in a thread beside the others, for as long as nothing waits for them.

    Args:
        graph: the graph as it was rewritten.
        replay: of this very graph.
        within: the operations that run.
        planned: the order that most of them keep.
        limit: bytes; a little more counts as too high.
        merged: operations that the kernels of others do in passing, and these.

    Returns:
        bytes; None where no order needs more than the limit and a little.
    """
    most = limit * _RARELY_PERCENT // 100
    for order in itertools.chain([planned], orders_left(graph, within)):
        if (peak := replay.crowded_peak(_in_passing(order, merged), merged)) > most:
            return peak
    return None


def _in_passing(order: Sequence[OpId], merged: Mapping[OpId, OpId]) -> Sequence[OpId]:
    """The order with what others do in passing right behind these, if it came later."""
    place = {op: at for at, op in enumerate(order)} if merged else {}
    behind: dict[OpId, list[OpId]] = {}
    for op, other in merged.items():
        if place.get(op, -1) > place.get(other, len(order)):
            behind.setdefault(other, []).append(op)
    if not behind:
        return order
    moved = {op for ops in behind.values() for op in ops}
    return [one for op in order if op not in moved for one in (op, *behind.get(op, ()))]
