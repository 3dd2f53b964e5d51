"""Memory in slots: how many bytes a slot stands for, and how sizes are rounded to slots."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tflms.checkpointing.problem import Ints, Problem
from tflms.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Grid:
    """Memory in slots: slot m stands for m * available / slots bytes.

    Attributes:
        available: bytes that all slots together stand for.
        slots: how many there are.
        limit: the bytes there are beside the chain's input; at least ``available``.
        exact: whether every size is a whole number of slots, so that rounding loses nothing.
        carries: how sizes of stored items are rounded. False: up, so that a table never promises
            what does not fit, but each stored item wastes half a slot. True: the rounding error
            of one stage is carried on to the next, so that sums over many stages are right; such
            a table is an estimate, and what fits must be checked in bytes.
        least: the smallest limit, beside the chain's input, that a table answers; None: ``limit``.
    """

    available: int
    slots: int
    limit: int
    exact: bool
    carries: bool = False
    least: int | None = None

    @classmethod
    def of(cls, problem: Problem, available: int, slots: int, *, least: int | None = None) -> Grid:
        """Choose the slots: exact where the sizes share a divisor large enough for it.

        Raises:
            ConfigError: the numbers are too large for 64-bit arithmetic.
        """
        divisor = math.gcd(*problem.sizes().tolist()) or 1
        units = available // divisor
        if available * (slots + 2) >= 1 << 62:
            raise ConfigError(
                f"{available} bytes in {slots} slots cannot be counted in 64 bits; use fewer slots"
            )
        if 0 < units <= slots:
            return cls(units * divisor, units, available, exact=True, least=least)
        return cls(max(available, 1), slots, available, exact=False, least=least)

    def carrying(self) -> Grid:
        """Return the same slots with the other way of rounding."""
        return replace(self, carries=True)

    @property
    def slot_bytes(self) -> float:
        """How many bytes a slot stands for."""
        return self.available / self.slots

    def first_reached(self, problem: Problem) -> Ints:
        """Return for each s the least slot at which stages s.. can come up.

        At most abar^1 .. abar^(s-1) are in memory then; where the rounding error is carried on, a
        few slots more may be taken.
        """
        stored = np.cumsum(self.stored(problem.saved)) - self.stored(problem.saved)
        margin = 8 if self.carries else 0
        start = self.slots if self.least is None else int(self.down(self.least))
        reached: Ints = np.maximum(start - stored - margin, 0)
        return reached

    def reached_share(self, problem: Problem) -> float:
        """Return which share of all additions concerns slots that can be reached, about."""
        weights = np.arange(problem.stages, -1, -1.0) ** 2
        reached = self.slots + 1 - self.first_reached(problem)
        return float(np.average(reached, weights=weights)) / (self.slots + 1)

    def up(self, nbytes: Any) -> Any:
        """Return bytes as slots, rounded up and at most one more than there are."""
        clipped = np.minimum(nbytes, self.available + 1)
        return np.minimum(-(-clipped * self.slots // self.available), self.slots + 1)

    def down(self, nbytes: Any) -> Any:
        """Return bytes as slots, rounded down and at most as many as there are."""
        return np.minimum(nbytes, self.available) * self.slots // self.available

    def stored(self, sizes: Ints) -> Ints:
        """Return the sizes of stored items, one a stage, as slots."""
        if not self.carries:
            return -(-np.minimum(sizes, self.available + 1) * self.slots // self.available)
        sums = np.concatenate([[0.0], np.cumsum(sizes, dtype=float)])
        ends = np.rint(sums * (self.slots / self.available)).astype(np.int64)
        return ends[1:] - ends[:-1]
