"""Decides how long each copy between device and host is taken to last, where that is varied."""

from __future__ import annotations

from tflms.planning.buffers import Transfer

_SHORT_LAG, _LONG_LAG = 3, 10  # operations that may start before a copy back has its buffer


def lasts(copy: Transfer, pace: int) -> bool:
    """Tell whether a copy is taken to be slow."""
    return pace == 0 or (pace > 1 and (_drawn(copy) >> (5 + pace)) & 1 == 1)


def lag(copy: Transfer, pace: int) -> int:
    """After how many operations a copy back gets its buffer."""
    if pace <= 1:
        return 1
    longest = _LONG_LAG if pace % 2 else _SHORT_LAG
    return 1 + (_drawn(copy) >> (9 + pace)) % longest


def _drawn(copy: Transfer) -> int:
    """A number that looks drawn and is the same whenever this value is copied."""
    return (2 * copy.source + copy.out) * 2654435761
