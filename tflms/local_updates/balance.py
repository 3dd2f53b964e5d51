"""Chooses cut positions so that the dearest chunk is as cheap as possible (an exact search)."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def balanced_cuts(
    positions: Sequence[int],
    *,
    chunks: int,
    end: int,
    cost: Callable[[int, int], float],
    cut_bytes: Callable[[int], float],
) -> tuple[int, ...] | None:
    """Return the ``chunks - 1`` positions with the least maximal cost, then the fewest bytes.

    A position p cuts between the items before p and those from p on; a chunk is a range of items.

    Args:
        positions: the allowed positions, ascending.
        chunks: how many chunks are wanted.
        end: number of items.
        cost: cost of the items ``[start, stop)``; infinity where the range must not be a chunk.
        cut_bytes: bytes that cross at a position.

    Returns:
        The positions, or None where no choice has a finite cost.
    """
    borders = [0, *positions, end]
    last = len(borders) - 1
    infinity = float("inf")

    def solve(
        score: Callable[[int, int], float], join: Callable[[float, float], float]
    ) -> tuple[float, tuple[int, ...]]:
        best = [0.0] + [infinity] * last
        choice: list[list[int]] = []
        for _ in range(chunks):
            fresh = [infinity] * (last + 1)
            origin = [-1] * (last + 1)
            for right in range(1, last + 1):
                for left in range(right):
                    if best[left] == infinity:
                        continue
                    value = join(best[left], score(left, right))
                    if value < fresh[right]:
                        fresh[right], origin[right] = value, left
            best = fresh
            choice.append(origin)
        if best[last] == infinity:
            return infinity, ()
        path, at = [], last
        for origin in reversed(choice):
            at = origin[at]
            path.append(at)
        return best[last], tuple(borders[index] for index in reversed(path[:-1]))

    costs = {
        (left, right): cost(borders[left], borders[right])
        for right in range(1, last + 1)
        for left in range(right)
    }
    bound, _ = solve(lambda left, right: costs[left, right], max)
    if bound == infinity:
        return None

    def crossing(left: int, right: int) -> float:
        if costs[left, right] > bound:
            return infinity
        return cut_bytes(borders[right]) if right < last else 0.0

    _, path = solve(crossing, lambda a, b: a + b)
    return path
