"""Decides which chunks each loss trains: every method is a family of windows."""

from __future__ import annotations

from dataclasses import dataclass

from tflms.errors import ConfigError

METHODS = ("backprop", "greedy", "overlapping", "chunked", "last")


@dataclass(frozen=True, slots=True)
class Window:
    """The chunks ``first`` to ``last`` (inclusive), trained by the loss behind ``last``."""

    first: int
    last: int


def windows_of(
    method: str, *, chunks: int, window: int | None = None, stride: int | None = None
) -> tuple[Window, ...]:
    """Return the windows of a method in the order of their losses.

    The paper's variants (arXiv 2012.03837, figure 2) are one family: backpropagation is a window
    over all chunks, greedy and chunked are windows of one, overlapping is windows of two that
    advance by one, and ``last`` trains the last chunk alone.

    Args:
        method: one of ``METHODS``.
        chunks: how many chunks the network has.
        window: chunks in a window, only for ``overlapping`` (default 2).
        stride: chunks from one window's start to the next, only for ``overlapping`` (default 1).

    Raises:
        ConfigError: the method is unknown, or window and stride leave chunks without a loss.
    """
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    if method != "overlapping" and (window is not None or stride is not None):
        raise ConfigError(f"window= and stride= belong to method='overlapping', not {method!r}")
    if method == "backprop":
        return (Window(0, chunks - 1),)
    if method == "last":
        return (Window(chunks - 1, chunks - 1),)
    if method in ("greedy", "chunked"):
        return tuple(Window(index, index) for index in range(chunks))
    width = 2 if window is None else window
    step = 1 if stride is None else stride
    if not 1 <= step <= width:
        raise ConfigError(
            f"window={width}, stride={step}: a stride from 1 to the window's width is needed, "
            "else some chunks have no loss"
        )
    found: list[Window] = []
    first = 0
    while not found or found[-1].last < chunks - 1:
        found.append(Window(first, min(first + width, chunks) - 1))
        first += step
    return tuple(found)
