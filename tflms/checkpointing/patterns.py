"""Two sequences of operations that several strategies are made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tflms.checkpointing.operations import Kind, Operation


def segmented(stages: int, starts: Sequence[int]) -> list[Operation]:
    """Return the schedule that keeps the inputs of the segments starting at the given stages.

    ``starts`` begins with 1. Each segment but the last runs again, keeping everything, before its
    backward.
    """
    bounds = [*starts, stages + 1]
    operations: list[Operation] = []
    for first, after in itertools.pairwise(bounds[:-1]):
        operations.append(Operation(Kind.F_CK, first))
        operations.extend(Operation(Kind.F_NULL, stage) for stage in range(first + 1, after))
    for first, after in reversed(list(itertools.pairwise(bounds))):
        operations.extend(Operation(Kind.F_ALL, stage) for stage in range(first, after))
        operations.extend(Operation(Kind.B, stage) for stage in range(after - 1, first - 1, -1))
    return operations


def reverse_from_start(s: int, t: int) -> list[Operation]:
    """Return the reversal of stages s..t that keeps nothing but a^(s-1)."""
    operations: list[Operation] = []
    for stage in range(t, s - 1, -1):
        if stage > s:
            operations.append(Operation(Kind.F_CK, s))
            operations.extend(Operation(Kind.F_NULL, between) for between in range(s + 1, stage))
        operations += [Operation(Kind.F_ALL, stage), Operation(Kind.B, stage)]
    return operations
