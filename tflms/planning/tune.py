"""Searches the paper's dials by simulation: coordinate by coordinate, then how few values do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Judge = Callable[[Mapping[str, Any]], tuple[int, float]]  # dials -> peak bytes, seconds

_LEADS = (1, 2, 3, 5, 8, 12, 20)
_FUSE = (False, True)
_BRANCHES = ({"swap_branches": False}, {"swap_branches": True, "branch_threshold": 0},
             {"swap_branches": True, "branch_threshold": 20})  # fmt: skip
_LARGEST_COUNT = 1 << 14


def search(judge: Judge, limit: int) -> tuple[dict[str, Any] | None, int]:
    """Find dials that fit a limit at the least seconds; deterministic.

    With all values swapped, the lead, fusing and branches are tried together; for the best of them
    the least number of values that still fits is found by bisection. What makes no difference at
    one lead (branches, in a network without long ones) is not tried at the others.

    Args:
        judge: simulates a setting.
        limit: bytes on the device.

    Returns:
        the dials, or None where nothing fits, and the lowest peak that was seen.
    """
    lowest = 1 << 62
    fitting: list[tuple[float, int, dict[str, Any]]] = []
    judged: dict[tuple[bool, int], list[tuple[int, float]]] = {}
    for branches in _BRANCHES:
        for fuse in _FUSE:
            for lead in _LEADS:
                dials = {"lb": lead, "fuse_swapins": fuse, "n_tensors": -1, **branches}
                peak, seconds = judge(dials)
                lowest = min(lowest, peak)
                known = judged.setdefault((fuse, lead), [])
                if (peak, seconds) in known:
                    break
                known.append((peak, seconds))
                if peak <= limit:
                    fitting.append((seconds, len(fitting), dials))
    if not fitting:
        return None, lowest
    best: tuple[float, int, dict[str, Any]] | None = None
    for seconds, number, dials in sorted(fitting, key=lambda item: item[:2])[:3]:
        count, faster = _fewest(judge, limit, dials)
        found = {**dials, "n_tensors": count}
        if best is None or (min(seconds, faster), number) < best[:2]:
            best = (min(seconds, faster), number, found)
    assert best is not None
    return best[2], lowest


def _fewest(judge: Judge, limit: int, dials: Mapping[str, Any]) -> tuple[int, float]:
    """The least number of values that fits, and its seconds; -1 (all) where fewer do not."""
    low, high, seconds = 0, 1, 0.0
    peak, seconds = judge({**dials, "n_tensors": high})
    while peak > limit:
        low, high = high, 2 * high
        if high > _LARGEST_COUNT:
            return -1, judge({**dials, "n_tensors": -1})[1]
        peak, seconds = judge({**dials, "n_tensors": high})
    while high - low > 1:
        middle = (low + high) // 2
        peak, now = judge({**dials, "n_tensors": middle})
        if peak <= limit:
            high, seconds = middle, now
        else:
            low = middle
    return high, seconds
