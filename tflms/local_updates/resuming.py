"""Saves a run in the middle of an epoch and goes on from there, whatever the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from tflms.errors import ConfigError
from tflms.local_updates.checkpoint import restore, write_manifest


class Resuming:
    """The part of a trainer that knows how far the run is.

    Attributes:
        batches_done: batches given to the chunks since the start of the run.
        resumed: whether the next batch is the first one after a checkpoint.
    """

    batches_done: int
    resumed: bool
    runtime_name: str
    _to_skip: int
    _runtime: Any

    @property
    def stages(self) -> list[Any]:
        """The chunks at work, in order."""
        raise NotImplementedError

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluate one batch."""
        raise NotImplementedError

    def run_digest(self) -> str:
        """Return a hash of plan, method and windows."""
        raise NotImplementedError

    @property
    def skipping(self) -> bool:
        """Whether ``fit`` passes over batches that a resumed run has done."""
        return self._to_skip > 0

    def checkpoint(self, path: str | Path, *, epoch: int, batch_in_epoch: int) -> None:
        """Save all chunks as of the batches given so far; the manifest comes last."""
        batch = self.batches_done

        def done() -> None:
            write_manifest(
                path,
                digest=self.run_digest(),
                chunks=len(self.stages),
                epoch=epoch,
                batch_in_epoch=batch_in_epoch,
                batch=batch,
            )

        self._runtime.save(str(path), batch=batch, done=done)

    def _resume(self, path: str | Path, args: tuple[Any, ...], options: dict[str, Any]) -> int:
        """Restore a checkpoint and return the epoch it is in."""
        facts = restore(self.stages, path, digest=self.run_digest())
        if (
            facts["batch_in_epoch"]
            and options.get("shuffle", True)
            and options.get("y") is not None
        ):
            raise ConfigError(
                "resume= within an epoch needs the same order of batches: pass shuffle=False, or a "
                "tf.data.Dataset that yields one fixed order"
            )
        self.batches_done = facts["batch"]
        self._to_skip = facts["batch_in_epoch"]
        self.resumed = True
        return int(facts["epoch"])

    def _skip(self, iterator: Any) -> dict[str, Any]:
        data = next(iterator)
        self._to_skip -= 1
        if self.runtime_name == "fused" and any(stage.kept_metrics for stage in self.stages):
            # Tracing makes the metrics' variables; nothing runs.
            tf.function(self.test_step, autograph=False).get_concrete_function(data)
            for stage in self.stages:
                stage.restore_metrics()
        found: dict[str, Any] = self._runtime.live()
        return found
