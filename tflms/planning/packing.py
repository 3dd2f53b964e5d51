"""Predicts what a device's allocator has handed out at the peak: more than the sum of the sizes.

A hole that is a little larger than what is asked for is handed out whole, so that a step holds
more than its buffers. How much depends on which holes there are.
"""

from __future__ import annotations

from tflms.planning.allocator import (
    NEVER_WASTED_NBYTES,
    NEVER_WASTED_ON_EMULATOR_NBYTES,
    Arena,
    play,
)
from tflms.planning.simulate import Events


def waste_of(kind: str) -> int:
    """Return the rest of a hole from which on the allocator of a kind of device splits it."""
    return NEVER_WASTED_ON_EMULATOR_NBYTES if kind == "EMU" else NEVER_WASTED_NBYTES


def packed_peak(asked: Events, capacity: int, waste: int) -> int | None:
    """Return the most bytes that are handed out at a time in a device of that capacity.

    Args:
        asked: what stays, what comes and goes in a step.
        capacity: bytes of the device.
        waste: the rest of a hole from which on it is split.

    Returns:
        bytes; None where something finds no room.
    """
    arena = Arena(capacity, waste)
    spill = play(arena, asked.persistent, asked.events)
    return arena.peak if spill is None else None
