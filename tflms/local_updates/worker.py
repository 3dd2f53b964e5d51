"""Runs one chunk against its queues; threads and processes share it word for word."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from tflms.local_updates.channels import Channel, Message
from tflms.local_updates.checkpoint import save_stage
from tflms.local_updates.failure import ChunkError
from tflms.local_updates.optimizers import set_learning_rate
from tflms.local_updates.stage import Stage
from tflms.local_updates.step import Back, Done, Forward, Need, floats, train_step
from tflms.runtime import hook

_FRAME = ("Graph execution error", "Detected at node", "<stack traces", "File ", "[[", "node ")
_NODE = re.compile(r"\{\{.*?\}\}")


class Worker:
    """One chunk between its queues.

    Args:
        stage: the chunk.
        inbox: batches and tokens from the chunk before.
        outbox: to the chunk behind; None behind the last.
        back_in: cotangents from the chunk behind, where windows overlap.
        back_out: cotangents to the chunk before.
        report: called with facts at each ``epoch`` and ``close`` token.
        stop_on_nan: end the run when the loss is no number.
        start: batches that an earlier run has done.

    Attributes:
        batches: batches done since the start of the run.
        busy_since: monotonic seconds since when a batch is at work, or None.
        bytes_in: bytes taken from the inbox so far.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        inbox: Channel,
        outbox: Channel | None,
        back_in: Channel | None,
        back_out: Channel | None,
        report: Callable[[dict[str, Any]], None],
        stop_on_nan: bool,
        start: int = 0,
    ) -> None:
        self.stage = stage
        self.inbox = inbox
        self.outbox = outbox
        self.back_in = back_in
        self.back_out = back_out
        self.report = report
        self.stop_on_nan = stop_on_nan
        self.batches = start
        self.busy_since: float | None = None
        self.bytes_in = 0
        self.closing = threading.Event()
        # A rewriter listens to the thread that made it; this chunk traces in a thread of its own.
        self._listener = hook.current()
        self._step = tf.function(self._train, autograph=False, reduce_retracing=True)

    def run(self) -> None:
        """Serve messages until the ``close`` token.

        Raises:
            ChunkError: the chunk's step failed, a queue was closed, or batches are out of order.
        """
        while True:
            try:
                message = self.inbox.take()
            except tf.errors.OpError as error:
                raise self.error(f"its input was closed ({_short(error)})") from error
            self.busy_since = time.monotonic()
            try:
                ended = self._serve(message)
            except ChunkError:
                raise
            except Exception as error:
                raise self.error(f"{type(error).__name__}: {_short(error)}") from error
            self.busy_since = None
            if ended:
                return

    def error(self, reason: str) -> ChunkError:
        """Return an error that names this chunk and the batch it is at."""
        return ChunkError(reason, chunk=self.stage.index, batch=self.batches)

    def _serve(self, message: Message) -> bool:
        facts = message.facts
        self.bytes_in += message.nbytes
        if facts["batch"] != self.batches:
            raise self.error(
                f"message {facts['kind']!r} carries batch {facts['batch']}: one was lost or doubled"
            )
        if facts["kind"] == "train":
            self._train_on(message)
            return False
        if facts["kind"] == "reset" and self.stage.exit is not None:
            for metric in self.stage.exit.metrics:
                metric.reset_state()
        if facts["kind"] == "save":
            save_stage(self.stage, facts["path"], facts=facts)
        if self.outbox is not None:
            if facts["kind"] == "close":
                self.closing.set()
            self.outbox.put_token(facts)
        if facts["kind"] in ("epoch", "save", "close"):
            self.report({"kind": facts["kind"], "chunk": self.stage.index, "batch": self.batches})
        return bool(facts["kind"] == "close")

    def _train_on(self, message: Message) -> None:
        rate = message.facts["rate"]
        if rate is not None:
            set_learning_rate([self.stage.optimizer], rate)
        weighted = message.facts["weighted"]
        count = len(message.tensors) - 1 - weighted
        inputs, labels = message.tensors[:count], message.tensors[count]
        weights = message.tensors[-1] if weighted else None
        header = tf.constant(json.dumps(message.facts))
        heard = nullcontext() if self._listener is None else hook.listening(self._listener)
        with self.stage.on_device(), heard:
            if self.stage.kept_metrics:
                self._step.get_concrete_function(header, inputs, labels, weights)
                self.stage.restore_metrics()
            loss = self._step(header, inputs, labels, weights)
        if self.stop_on_nan and loss is not None and not math.isfinite(float(loss)):
            raise self.error(
                "its loss is no number (NaN or infinite); lower the learning rate, or pass "
                "stop_on_nan=False to go on"
            )
        self.batches += 1

    def _train(self, header: Any, inputs: list[Any], labels: Any, weights: Any) -> Any:
        """Carry the events of the chunk's step through the queues, within the graph."""
        step = train_step(self.stage, inputs, labels, weights)
        answer: list[Any] | None = None
        leaving: list[Any] = []
        while True:
            event = step.send(answer)
            answer = None
            match event:
                case Forward(outputs):
                    leaving = floats(outputs)
                    if self.outbox is not None:
                        extra = [labels] if weights is None else [labels, weights]
                        self.outbox.put(header, [*outputs, *extra])
                case Back(_, cotangents):
                    assert self.back_out is not None
                    self.back_out.put(header, cotangents)
                case Need(_):
                    assert self.back_in is not None
                    answer = self.back_in.take_like(leaving)
                case Done(_, loss):
                    return loss


def _short(error: Exception) -> str:
    """Return the first line of an error without TensorFlow's trace of nodes."""
    text = str(getattr(error, "message", None) or error)
    lines = [_NODE.sub("", line).strip() for line in text.splitlines()]
    return next((line for line in lines if line and not line.startswith(_FRAME)), "no message")[
        :300
    ]
