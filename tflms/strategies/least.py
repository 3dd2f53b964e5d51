"""Finds about the smallest limit that can be kept, by trying others once one was refused."""

from __future__ import annotations

from collections.abc import Callable

_RAISES = 5  # limits that are tried until one is kept
_RAISE = 20  # one of so many parts more at least, then twice as much each time
_SMALL_GRAPH = 3000  # operations; of larger graphs fewer limits are tried, so that it takes seconds
_BISECTIONS = 4
_NEAR = 50  # one of so many parts: nearer it is not looked for


def fewer(tries: int, operations: int, *, fewest: int = 1) -> int:
    """Return how often to try for a graph of so many operations: less often for a large one."""
    return max(fewest, tries * _SMALL_GRAPH // max(operations, _SMALL_GRAPH))


def least_limit(
    keeps: Callable[[int], bool],
    estimate: Callable[[], int],
    refused: int,
    first: int,
    *,
    operations: int,
) -> int | None:
    """Return a limit that is kept and not far above one that is not.

    Args:
        keeps: whether a plan keeps a limit in bytes.
        estimate: of what would be kept, in bytes, after one was not.
        refused: bytes; a limit that is not kept.
        first: bytes; the limit that is tried first.
        operations: of the step.

    Returns:
        bytes; None where none of those that were tried is kept.
    """
    low, high = refused, max(first, refused + 1)
    for time in range(_RAISES):
        if keeps(high):
            break
        low, high = high, max(estimate(), high + (high << time) // _RAISE + 1)
    else:
        return None
    for _ in range(fewer(_BISECTIONS, operations)):
        if high - low <= high // _NEAR:
            break
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high
