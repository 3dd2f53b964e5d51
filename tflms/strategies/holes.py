"""Clears room for large buffers: what lies in the way is parked, or comes back later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tflms.graph.erase import original
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.planning.allocator import Overflow, cheapest_hole, least_capacity
from tflms.planning.auto import Decision, Problem
from tflms.planning.simulate import Events, Replay

# A plan fits however fast copies are (the number is a pace, see ``Replay.events``), and near the
# floor also where small buffers lie scattered.
VARIANTS = tuple((pace, False) for pace in (1, 0, 2, 3, 4, 5, 6, 7, 8, 9))
TIGHT_VARIANTS = ((1, False), (1, True), (0, False), (0, True), *VARIANTS[2:])
# Of the limit, into which buffers must fit: what variables were started with is an estimate, and
# near the floor a buffer that goes a moment late takes another's place.
ROOM_PER_MILLE = 996
TIGHT_ROOMS_PER_MILLE = (975, 985)  # the second where the first is too little
_JUDGED = 2  # variants, where a limit was refused and another one is looked for


def least_limit(
    tried: Sequence[tuple[int, Replay, list[OpId]]], waste: int, tight_below: int
) -> int:
    """About the smallest limit that the plan with the lowest peak would keep.

    Args:
        tried: plans: their peaks, replays and orders.
        waste: see ``overflow``.
        tight_below: bytes; limits below keep more room.
    """
    peak, replay, planned = min(tried, key=lambda plan: plan[0])
    for pace, scattered in VARIANTS[:_JUDGED]:
        asked = replay.events(planned, pace)
        peak = least_capacity(
            asked.persistent, asked.events, peak, waste=waste, scattered=scattered
        )
    tight = peak * 1000 // TIGHT_ROOMS_PER_MILLE[0] + 1
    return tight if tight < tight_below else max(peak * 1000 // ROOM_PER_MILLE + 1, tight_below)


@dataclass(frozen=True, slots=True)
class Spill:
    """A buffer that finds no room: what was asked for, the allocation that failed, the order."""

    asked: Events
    found: Overflow
    planned: Sequence[OpId]


def in_the_way(
    graph: Graph, setup: Problem, decision: Decision, spills: Sequence[Spill]
) -> dict[ValueId, tuple[int, ...]] | None:
    """Ask for the values to be gone whose buffers leave no hole for what found none.

    Returns:
        per value, places at which it must be away; None where nothing can be done.
    """
    cleared = [found for spill in spills if (found := _cleared(graph, setup, spill)) is not None]
    if not cleared:
        return None
    away: dict[ValueId, tuple[int, ...]] = {}
    for value, gone, back in decision.stays:  # what is parked stays so: less is held, never more
        away[value] = (*away.get(value, ()), gone, back)
    for places in (setup.away, *cleared):
        for value, at in places.items():
            away[value] = (*away.get(value, ()), *at)
    return {value: tuple(sorted(set(at))) for value, at in away.items()}


def _cleared(graph: Graph, setup: Problem, spill: Spill) -> dict[ValueId, tuple[int, ...]] | None:
    """Places at which values must be away for one buffer to find room; None: it finds none."""
    asked, planned = spill.asked, spill.planned
    at = asked.places[spill.found.event]
    place = _place_of(setup, planned, at)

    def value_in(buffer: int) -> ValueId | None:
        value = asked.tenant(buffer, at)
        if value is not None and graph.producer(value).role == "swap_in":
            value = original(graph, value)
        return value

    def price(buffer: int) -> float | None:
        value = value_in(buffer)
        if value is None or place in setup.away.get(value, ()):
            return None
        gap = setup.may_be_away(value, place)
        return None if gap is None else float(gap.nbytes)

    def floating(buffer: int) -> bool:
        return buffer in asked.tenants

    moved: list[ValueId] = []
    for may_float in (floating, lambda _: False):  # what floats alone may come to lie there again
        found = cheapest_hole(spill.found, price, may_float) or ()
        values = [(buffer, value_in(buffer)) for buffer in found]
        came = {b: asked.tenants[b][0][0] for b, v in values if price(b) is None}
        moved = [v for b, v in values if b not in came and v is not None]
        if moved:
            break
    else:
        return None
    earliest = min((_place_of(setup, planned, at) for at in came.values()), default=place)
    early = earliest < place
    return {
        v: (place, earliest) if early and setup.may_be_away(v, earliest) else (place,)
        for v in moved
    }


def _place_of(setup: Problem, planned: Sequence[OpId], at: int) -> int:
    """The place in the order without swaps that belongs to one in the order with them."""
    before = set(planned[:at])
    return min(sum(op in before for op in setup.order), len(setup.order) - 1)
