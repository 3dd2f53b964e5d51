"""Predicts whether a step's buffers find room in a device: TensorFlow's best-fit allocator.

The sum of what is alive is not enough: buffers are contiguous, holes between them may be too
small, and a hole that is taken is not always split. The same choices are made here as by
``BFCAllocator`` (tensorflow/core/common_runtime/bfc_allocator.cc, "best-fit with coalescing").
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_UNIT = 256  # the device's allocator hands out multiples of this
_SMALL_NBYTES = 64 * 1024  # buffers whose places depend on what is not predicted
_LARGE_HOLE_NBYTES = 1024 * 1024  # where one of them may be in the way
_FLOATING_PRICE = 0.25  # per byte of a buffer that had better come to lie elsewhere
NEVER_WASTED_NBYTES = 128 * 1024 * 1024  # a hole that is larger by so much is always split
NEVER_WASTED_ON_EMULATOR_NBYTES = 64 * 1024  # its allocator is told to split


def rounded(nbytes: int) -> int:
    """Return the size of the allocation that holds so many bytes."""
    return -(-nbytes // _UNIT) * _UNIT


@dataclass(frozen=True, slots=True)
class Event:
    """A buffer comes (``nbytes`` above 0) or goes (0); ``once`` it comes in the first step only."""

    buffer: int
    nbytes: int
    once: bool = False


class Arena:
    """One region of device memory, with holes ordered by size and address."""

    def __init__(self, capacity: int, waste: int = NEVER_WASTED_NBYTES) -> None:
        self.capacity, self._waste = capacity, waste
        size = capacity // _UNIT * _UNIT
        self._holes: list[tuple[int, int]] = [(size, 0)]  # (size, address)
        self._hole_at: dict[int, int] = {0: size}
        self._hole_ending: dict[int, int] = {size: 0}
        self._taken: dict[int, tuple[int, int]] = {}
        self.in_use = 0
        self.peak = 0

    def allocate(self, buffer: int, nbytes: int, *, at_least: int = 0) -> bool:
        """Give a buffer the smallest hole that holds it; False where there is none.

        Of holes of ``at_least`` so many bytes, if there is one.
        """
        size = max(_UNIT, rounded(nbytes))
        at = bisect.bisect_left(self._holes, (max(size, at_least), -1))
        if at == len(self._holes):
            at = bisect.bisect_left(self._holes, (size, -1))
        if at == len(self._holes):
            return False
        hole, address = self._holes.pop(at)
        del self._hole_at[address]
        del self._hole_ending[address + hole]
        if hole >= 2 * size or hole - size >= self._waste:
            self._add_hole(address + size, hole - size)
            hole = size
        self._taken[buffer] = (address, hole)
        self.in_use += hole
        self.peak = max(self.peak, self.in_use)
        return True

    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """Return what is held, by address: buffer, address, bytes."""
        return tuple(sorted(((b, at, n) for b, (at, n) in self._taken.items()), key=lambda x: x[1]))

    def free(self, buffer: int) -> None:
        """Take a buffer back and join its hole with its neighbours."""
        address, size = self._taken.pop(buffer)
        self.in_use -= size
        behind = self._hole_at.get(address + size)
        if behind is not None:
            self._remove_hole(address + size, behind)
            size += behind
        before = self._hole_ending.get(address)
        if before is not None:
            length = address - before
            self._remove_hole(before, length)
            address, size = before, size + length
        self._add_hole(address, size)

    def _add_hole(self, address: int, size: int) -> None:
        if not size:
            return
        bisect.insort(self._holes, (size, address))
        self._hole_at[address] = size
        self._hole_ending[address + size] = address

    def _remove_hole(self, address: int, size: int) -> None:
        del self._holes[bisect.bisect_left(self._holes, (size, address))]
        del self._hole_at[address]
        del self._hole_ending[address + size]


@dataclass(frozen=True, slots=True)
class Overflow:
    """An allocation that finds no room.

    Attributes:
        event: its place in the list of events.
        nbytes: what was asked for.
        blocks: what is held then, by address: buffer, address, bytes.
        capacity: bytes of the device.
    """

    event: int
    nbytes: int
    blocks: tuple[tuple[int, int, int], ...]
    capacity: int


def packs(
    persistent: Iterable[int],
    events: Sequence[Event],
    capacity: int,
    *,
    waste: int = NEVER_WASTED_NBYTES,
    steps: int = 2,
    scattered: bool = False,
) -> bool:
    """Tell whether steps run in a device of that capacity, one by one (``overflow``)."""
    found = overflow(persistent, events, capacity, waste=waste, steps=steps, scattered=scattered)
    return found is None


def overflow(
    persistent: Iterable[int],
    events: Sequence[Event],
    capacity: int,
    *,
    waste: int = NEVER_WASTED_NBYTES,
    steps: int = 2,
    scattered: bool = False,
) -> Overflow | None:
    """Return the first allocation for which a device of that capacity has no room, or None.

    Args:
        persistent: bytes of what stays: variables and constants.
        events: what comes and goes in a step, in order.
        capacity: bytes of the device.
        waste: what is left of a hole is handed out with it where it is smaller than this and
            than what was asked for.
        steps: how many steps to try; the second finds the holes that the first left.
        scattered: small buffers come to lie in holes that large ones could need.
    """
    arena = Arena(capacity, waste)
    return play(arena, persistent, events, steps=steps, scattered=scattered)


def play(
    arena: Arena,
    persistent: Iterable[int],
    events: Sequence[Event],
    *,
    steps: int = 2,
    scattered: bool = False,
) -> Overflow | None:
    """Run steps in a region of memory; the arguments and the result are those of ``overflow``."""
    for number, nbytes in enumerate(persistent):
        if nbytes and not arena.allocate(-1 - number, nbytes):
            return Overflow(0, nbytes, arena.blocks(), arena.capacity)
    for step in range(steps):
        for place, event in enumerate(events):
            if event.once and step:
                continue
            if not event.nbytes:
                arena.free(event.buffer)
                continue
            small = scattered and event.nbytes < _SMALL_NBYTES
            room = _LARGE_HOLE_NBYTES if small else 0
            if not arena.allocate(event.buffer, event.nbytes, at_least=room):
                return Overflow(place, event.nbytes, arena.blocks(), arena.capacity)
    return None


def cheapest_hole(
    found: Overflow, price: Callable[[int], float | None], floating: Callable[[int], bool]
) -> tuple[int, ...] | None:
    """Return the buffers that are in the way of the cheapest hole for what found no room.

    Args:
        found: the allocation.
        price: of taking a buffer away; None where it cannot be.
        floating: whether one that cannot be taken away is so young that it could lie elsewhere in
            the same stretch, if the others were gone before it came.

    Returns:
        their numbers, by address; None where no stretch of addresses can be cleared.
    """
    need = rounded(found.nbytes)
    best: tuple[float, tuple[int, ...]] | None = None
    window: deque[tuple[int, float, int, int]] = deque()  # buffer, cost, floating bytes, end
    start, total, afloat = 0, 0.0, 0  # of the stretch that ends at the block that is looked at
    for buffer, address, size in (*found.blocks, (0, found.capacity, 0)):
        while window and address - window[0][3] >= need + afloat - window[0][2]:
            _, cost, floats, start = window.popleft()
            total, afloat = total - cost, afloat - floats
        if address - start >= need + afloat and (best is None or total < best[0]):
            best = (total, tuple(entry[0] for entry in window))
        cost_or_none = price(buffer) if size else None
        floats = 0
        if cost_or_none is None and size and floating(buffer):
            cost_or_none, floats = size * _FLOATING_PRICE, size
        if cost_or_none is None:
            window.clear()
            start, total, afloat = address + size, 0.0, 0
        else:
            window.append((buffer, cost_or_none, floats, address + size))
            total, afloat = total + cost_or_none, afloat + floats
    return None if best is None else best[1]


def least_capacity(
    persistent: Sequence[int],
    events: Sequence[Event],
    low: int,
    *,
    waste: int = NEVER_WASTED_NBYTES,
    scattered: bool = False,
) -> int:
    """Return about the smallest capacity (to 0.5 %) in which the steps run, searched from below."""
    high = low
    while not packs(persistent, events, high, waste=waste, scattered=scattered):
        high += high // 8 + 1
    while high - low > high // 200:
        middle = (low + high) // 2
        if packs(persistent, events, middle, waste=waste, scattered=scattered):
            high = middle
        else:
            low = middle
    return high
