"""The error of a run that stops: it always names the chunk and the batch."""

from __future__ import annotations

from tflms.errors import TflmsError


class ChunkError(TflmsError, RuntimeError):
    """A chunk cannot go on: an exception in its step, a lost peer, a timeout, a NaN loss.

    Attributes:
        chunk: index of the chunk where the trouble began, counted from 0.
        batch: index of the batch (since the start of the run) it was at, or None before the first.
        reason: what happened, without chunk and batch.
    """

    def __init__(self, reason: str, *, chunk: int, batch: int | None) -> None:
        where = "before its first batch" if batch is None else f"at batch {batch}"
        super().__init__(f"chunk {chunk} stopped {where}: {reason}")
        self.chunk = chunk
        self.batch = batch
        self.reason = reason
