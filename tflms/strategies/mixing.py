"""Tries how much of what is cheap to compute again, so that neither link nor device waits long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

# Of the bytes that may be computed again.
_PARTS = (0.2, 0.3, 0.4, 0.5, 0.575, 0.65, 0.725, 0.8)
_START = 3

Variant = TypeVar("Variant")


def variants(
    make: Callable[[float], Variant | None], seconds: Callable[[Variant], float]
) -> list[Variant]:
    """Return the rewrites for some parts of what may be computed again.

    Starts in the middle and goes on to more, or else to less, as long as that is quicker.

    Args:
        make: a rewrite for one part of the bytes, or None where the limit is not kept.
        seconds: how long a rewritten step takes.
    """
    tried: dict[int, Variant | None] = {_START: make(_PARTS[_START])}
    for way in (1, -1):
        at = _START
        while 0 <= at + way < len(_PARTS):
            known, new = tried[at], make(_PARTS[at + way])
            tried[at + way] = new
            if new is None and (way > 0 or known is not None):
                break
            if new is not None and known is not None and seconds(new) >= seconds(known):
                break
            at += way
        if at != _START:
            break
    return [one for one in tried.values() if one is not None]
