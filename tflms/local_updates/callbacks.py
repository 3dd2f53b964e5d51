"""A Keras callback that saves all chunks at one batch, without stopping those behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from tflms.errors import ConfigError


class LocalCheckpoint(keras.callbacks.Callback):
    """Saves the run every so many batches; ``fit(resume=...)`` goes on from there.

    Args:
        folder: where the checkpoints go, one folder ``batch_N`` each.
        every_batches: batches between two checkpoints, counted over the whole run.
    """

    def __init__(self, folder: str | Path, *, every_batches: int) -> None:
        super().__init__()
        if every_batches < 1:
            raise ConfigError(f"every_batches={every_batches} makes no sense; use 1 or more")
        self.folder = Path(folder)
        self.every_batches = every_batches
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Take note of the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save when it is time."""
        done = self.model.batches_done
        if done % self.every_batches == 0 and not self.model.skipping:
            self.model.checkpoint(
                self.folder / f"batch_{done}", epoch=self._epoch, batch_in_epoch=batch + 1
            )
