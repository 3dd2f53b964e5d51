"""The exact rival: pipelined backpropagation in micro-batches, one thread per chunk (GPipe).

A batch is cut into micro-batches; all go forward through the chunks, then their cotangents go back,
then every chunk updates once. The gradient is that of the whole batch (arXiv 1811.06965); between
batches the pipe runs empty, for the share (K - 1) / (M + K - 1) of the time. BatchNorm sees
micro-batches, as in every such pipeline.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import keras
import tensorflow as tf

from tflms.errors import ConfigError
from tflms.local_updates.assembly import build_stages
from tflms.local_updates.channels import Channel
from tflms.local_updates.failure import ChunkError
from tflms.local_updates.optimizers import optimizers_for
from tflms.local_updates.plan import SplitPlan
from tflms.local_updates.stage import Stage
from tflms.local_updates.step import floats
from tflms.local_updates.windows import windows_of


class PipelineTrainer:
    """Trains a split model exactly, in a pipeline of micro-batches over packed queues.

    Args:
        model: the model that was split.
        plan: where it is cut.
        micro_batches: how many parts a batch is cut into.
        devices: TensorFlow device per chunk.

    Attributes:
        cut_bytes: per cut, bytes that crossed it both ways so far, as packed for the wire.
        batches: batches trained so far.
    """

    def __init__(
        self,
        model: Any,
        plan: SplitPlan,
        *,
        micro_batches: int = 4,
        devices: list[str] | None = None,
    ) -> None:
        if plan.model is not model:
            raise ConfigError("plan= was made for another model; call split() with this one")
        if micro_batches < 1:
            raise ConfigError(f"micro_batches={micro_batches} makes no sense; use 1 or more")
        windows = windows_of("backprop", chunks=len(plan.chunks))
        self.plan = plan
        self.micro_batches = micro_batches
        self.stages = build_stages(plan, windows, heads="auto", head_options={}, devices=devices)
        self.cut_bytes = [0] * len(plan.cuts)
        self.batches = 0
        self.bubble = (len(self.stages) - 1) / (micro_batches + len(self.stages) - 1)
        self._loss: Any = None
        self._forward: list[Any] = []

    def compile(self, optimizer: Any, loss: Any) -> None:
        """Set the optimizer (copied for each chunk) and the loss (the mean over a batch)."""
        self._loss = keras.losses.get(loss)
        optimizers = optimizers_for(optimizer, chunks=len(self.stages))
        for stage, own in zip(self.stages, optimizers, strict=True):
            stage.optimizer = own
            own.build(list(stage.block.trainable_variables))
        self._forward = [
            tf.function(
                lambda *inputs, stage=stage: stage.forward(inputs, training=True),
                autograph=False,
                reduce_retracing=True,
            )
            for stage in self.stages
        ]

    def fit(self, batches: Iterable[tuple[Any, Any]]) -> list[float]:
        """Train on batches (x, y) and return each one's loss.

        Raises:
            ChunkError: a chunk's step failed.
        """
        if self._loss is None:
            raise ConfigError("call compile() before fit()")
        count = len(self.stages)
        forward = [Channel(2 * self.micro_batches) for _ in range(count)]
        back = [Channel(2 * self.micro_batches) for _ in range(count - 1)]
        losses: list[float] = []
        failures: list[ChunkError] = []

        def work(stage: Stage) -> None:
            index = stage.index
            try:
                _StageLoop(self, stage, forward, back, losses).run()
            except Exception as error:
                failures.append(
                    ChunkError(f"{type(error).__name__}: {error}", chunk=index, batch=len(losses))
                )
                for channel in [*forward, *back]:
                    channel.close()

        threads = [threading.Thread(target=work, args=(stage,)) for stage in self.stages]
        for thread in threads:
            thread.start()
        try:
            self._feed(batches, forward[0])
        except tf.errors.OpError as error:
            if not failures:
                raise error
        finally:
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
        self.batches += len(losses)
        return losses

    def _feed(self, batches: Iterable[tuple[Any, Any]], front: Channel) -> None:
        try:
            for x, y in batches:
                size = int(tf.shape(y)[0])
                bounds = [size * m // self.micro_batches for m in range(self.micro_batches + 1)]
                for start, stop in pairwise(bounds):
                    part = [tf.convert_to_tensor(t)[start:stop] for t in keras.tree.flatten(x)]
                    facts = {"kind": "train", "share": (stop - start) / size}
                    labels = tf.convert_to_tensor(y)[start:stop]
                    front.put(tf.constant(json.dumps(facts)), [*part, labels])
        finally:
            front.put_token({"kind": "close"})


class _StageLoop:
    """One chunk's loop: all micro-batches forward, all back, one update."""

    def __init__(
        self,
        trainer: PipelineTrainer,
        stage: Stage,
        forward: list[Channel],
        back: list[Channel],
        losses: list[float],
    ) -> None:
        last = stage.index == len(trainer.stages) - 1
        self._trainer = trainer
        self._stage = stage
        self._inbox = forward[stage.index]
        self._outbox = None if last else forward[stage.index + 1]
        self._back_in = None if last else back[stage.index]
        self._back_out = back[stage.index - 1] if stage.index else None
        self._losses = losses

    def run(self) -> None:
        while True:
            kept: list[tuple[Any, list[Any], list[Any]]] = []
            total = 0.0
            for _ in range(self._trainer.micro_batches):
                message = self._inbox.take()
                if message.facts["kind"] == "close":
                    if self._outbox is not None:
                        self._outbox.put_token(message.facts)
                    return
                if self._stage.index:
                    self._trainer.cut_bytes[self._stage.index - 1] += message.nbytes
                total += self._forward(message, kept)
            self._backward(kept)
            if self._outbox is None:
                self._losses.append(total)

    def _forward(self, message: Any, kept: list[tuple[Any, list[Any], list[Any]]]) -> float:
        *inputs, labels = message.tensors
        sources = floats(inputs) if self._stage.index else []
        value = 0.0
        with self._stage.on_device(), tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = self._trainer._forward[self._stage.index](*inputs)
            targets = floats(outputs)
            if self._outbox is None:
                loss = self._trainer._loss(labels, self._stage.main(outputs))
                loss *= message.facts["share"]
                targets = [loss]
                value = float(loss)
        if self._outbox is not None:
            header = tf.constant(json.dumps(message.facts))
            self._outbox.put(header, [*outputs, labels])
        kept.append((tape, targets, sources))
        return value

    def _backward(self, kept: list[tuple[Any, list[Any], list[Any]]]) -> None:
        variables = list(self._stage.block.trainable_variables)
        sums: list[Any] = [None] * len(variables)
        for tape, targets, sources in kept:
            seeds = None
            if self._back_in is not None:
                message = self._back_in.take()
                seeds = message.tensors
                self._trainer.cut_bytes[self._stage.index] += message.nbytes
            with self._stage.on_device():
                found = tape.gradient(targets, [*variables, *sources], output_gradients=seeds)
            for position, gradient in enumerate(found[: len(variables)]):
                before = sums[position]
                sums[position] = gradient if before is None else before + gradient
            if self._back_out is not None:
                cotangents = [
                    tf.zeros_like(source) if gradient is None else gradient
                    for gradient, source in zip(found[len(variables) :], sources, strict=True)
                ]
                self._back_out.put(tf.constant("{}"), cotangents)
        self._stage.optimizer.apply_gradients(zip(sums, variables, strict=True))
