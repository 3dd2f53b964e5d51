"""What threads and processes share: how ``fit`` feeds chunk 0, waits, and learns of faults."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tflms.errors import ConfigError
from tflms.local_updates.assembly import named_results
from tflms.local_updates.batches import unpack_batch
from tflms.local_updates.channels import Channel
from tflms.local_updates.failure import ChunkError
from tflms.local_updates.optimizers import learning_rate
from tflms.local_updates.worker import Worker

_LOG = logging.getLogger(__name__)
_TICK_SECONDS = 0.05


class PipeRuntime:
    """Feeds batches to chunk 0 while the others work behind; the base of threads and processes.

    Attributes:
        reports: facts that chunks reported and nobody has asked for yet.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.reports: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._failure: ChunkError | None = None
        self._front: Channel | None = None
        self._sent = 0
        self._drained: int | None = None
        self._live: dict[str, Any] = {}
        self._saving: dict[int, tuple[int, Callable[[], None]]] = {}
        self._opened = False
        self._evaluating = False

    # -- what the runtimes add -----------------------------------------------------------------

    def open(self, dtypes: list[Any]) -> Channel:
        """Start the chunks and return the queue in front of chunk 0."""
        raise NotImplementedError

    def watch(self) -> None:
        """Look for trouble that raises nothing by itself; called about every second."""

    def end(self) -> None:
        """Release what ``open`` started, after a close token or a failure."""

    def close_queues(self) -> None:
        """Wake everyone who waits in a queue."""

    def gathered(self) -> None:
        """Bring the chunks' weights here, once all have reported."""

    # -- called by the trainer -----------------------------------------------------------------

    def compiled(self) -> None:
        """Refuse new optimizers while chunks run with the old ones."""
        if self._opened:
            raise ConfigError("compile() while the chunks run; call it before fit()")

    def step(self, inputs: Any, labels: Any, weights: Any) -> None:
        """Keras traces no fused step here."""
        raise NotImplementedError

    def train_function(self) -> Callable[[Any], Any] | None:
        """Return what ``fit`` calls per batch: hand the batch to chunk 0 and go on."""
        return self._feed

    @contextmanager
    def session(self, name: str) -> Iterator[None]:
        """Surround ``fit``: whatever happens, the chunks end with it."""
        if name != "fit":
            self.drain()  # so that all chunks are read at one batch
            self._evaluating = True
            try:
                yield
            finally:
                self._evaluating = False
            return
        try:
            yield
            self.finish()
        except BaseException as error:
            if self._opened and not self.failed:  # a callback, the data or an interrupt
                what = f"{type(error).__name__} in fit: {error}"
                self.fail(ChunkError(what, chunk=0, batch=self._sent))
            self.abort()
            raise

    def fit(self, keras_fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run Keras's ``fit`` around the feeding."""
        try:
            return keras_fit(*args, **kwargs)
        except tf.errors.OpError as error:
            self.raise_failure()
            raise error

    def evaluate(self, keras_evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run Keras's ``evaluate`` here; the chunks rest at one batch meanwhile."""
        return keras_evaluate(*args, **kwargs)

    def reset(self) -> None:
        """Reset metrics that live elsewhere; the trainer has reset those in this process."""

    def drain(self) -> None:
        """Send an epoch token and wait until every chunk has met it."""
        if not self._opened or self._evaluating or self._drained == self._sent:
            return
        self._drained = self._sent
        self.token("epoch")
        self.wait_for("epoch")
        self.gathered()
        self._live.clear()
        self._live.update(self.results())

    # -- feeding -------------------------------------------------------------------------------

    def _feed(self, iterator: Any) -> dict[str, Any]:
        inputs, labels, weights = unpack_batch(next(iterator))
        tensors = [*inputs, labels, *([] if weights is None else [weights])]
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not self._opened:
            self._sent = self.trainer.batches_done
            self._front = self.open([tensor.dtype for tensor in tensors])
            self._opened, self._drained = True, None
            if not self.trainer.resumed:
                self.token("reset")
        facts = {
            "kind": "train",
            "batch": self._sent,
            "rate": learning_rate(self.trainer.optimizer),
            "weighted": int(weights is not None),
        }
        self._put(lambda front: front.put(tf.constant(json.dumps(facts)), tensors))
        self._sent += 1
        return self._live

    def token(self, kind: str, **facts: Any) -> None:
        """Send a token behind all batches so far."""
        if self._opened:
            self._put(lambda front: front.put_token({"kind": kind, "batch": self._sent, **facts}))

    def _put(self, action: Callable[[Channel], None]) -> None:
        self.raise_failure()
        assert self._front is not None
        try:
            action(self._front)
        except tf.errors.OpError:
            self.raise_failure(wait=True)
            raise

    def optimizers(self) -> list[Any]:
        """Return the optimizers whose learning rate follows the trainer's: it goes in headers."""
        return []

    def save(self, path: str, *, batch: int, done: Callable[[], None]) -> None:
        """Send a save token; ``done`` is called when every chunk has met it."""
        with self._changed:
            self._saving[batch] = (len(self.trainer.stages), done)
        self.token("save", path=path)

    def wait_for(self, kind: str) -> None:
        """Wait until every chunk has reported a token."""
        count = len(self.trainer.stages)
        with self._changed:
            while sum(report["kind"] == kind for report in self.reports) < count:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_TICK_SECONDS)
            self.reports = [report for report in self.reports if report["kind"] != kind]

    def live(self) -> dict[str, Any]:
        """Return the metrics to show meanwhile: those of the last epoch token."""
        return self._live

    def results(self) -> dict[str, Any]:
        """Return every exit's metrics as of the last epoch token."""
        return named_results(self.trainer.stages, mode="all", ensemble=None)

    # -- faults --------------------------------------------------------------------------------

    def reported(self, facts: dict[str, Any]) -> None:
        """Take a chunk's report."""
        done = None
        with self._changed:
            if facts["kind"] == "save":
                left, done = self._saving[facts["batch"]]
                self._saving[facts["batch"]] = (left - 1, done)
                done = done if left == 1 else None
            else:
                self.reports.append(facts)
                self._changed.notify_all()
        if done is not None:
            done()

    def fail(self, error: ChunkError) -> None:
        """Take the first failure and wake everyone; later ones are its consequences."""
        with self._changed:
            first = self._failure is None
            if first:
                self._failure = error
            self._changed.notify_all()
        if first:
            _LOG.debug("run fails: %s", error)
            self.close_queues()

    @property
    def failed(self) -> bool:
        """Whether the run has failed."""
        return self._failure is not None

    def raise_failure(self, *, wait: bool = False) -> None:
        """Raise the failure, if there is one.

        Args:
            wait: a queue has just been closed, so a failure is about to be told.
        """
        limit = time.monotonic() + (2.0 if wait else 0.0)
        while self._failure is None and time.monotonic() < limit:
            time.sleep(_TICK_SECONDS)
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """End the chunks after the last batch."""
        if self._opened:
            self.token("close")
            self.wait_for("close")
            self._opened = False
            self.end()

    def abort(self) -> None:
        """End the chunks at once."""
        if self._opened:
            self._opened = False
            self.close_queues()
            self.end()
        self.reports.clear()
        self._failure = None

    def run_worker(self, worker: Worker) -> None:
        """Run a chunk and turn what it raises into the failure of the run."""
        try:
            worker.run()
        except ChunkError as error:
            self.fail(error)
        except BaseException as error:
            self.fail(worker.error(f"{type(error).__name__}: {error}"))
