"""The fused runtime's step: all chunks in one graph, each one ordered behind the last one's update.

Without the order TensorFlow starts a chunk's forward pass as soon as its input is there and keeps
every chunk's activations at once: nothing is saved, in silence.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from tflms.errors import InvariantError
from tflms.local_updates.stage import Stage
from tflms.local_updates.step import Back, Done, Event, Forward, Need, train_step
from tflms.local_updates.windows import Window


class Sweep:
    """Carries the events of all chunks' steps within one graph.

    Args:
        stages: the chunks in order.
        ordered: put each chunk behind the finished ones by control dependencies. False shows what
            happens without (the examples and the memory test do).
    """

    def __init__(self, stages: Sequence[Stage], *, ordered: bool = True) -> None:
        self._stages = stages
        self._ordered = ordered
        self._steps: dict[int, Generator[Event, list[Any] | None, None]] = {}
        self._waiting: dict[int, Window] = {}
        self._mail: dict[tuple[int, Window], list[Any]] = {}
        self._finished: list[Any] = []
        self._done: dict[int, Done] = {}
        self._outputs: list[Any] = []

    def run(self, inputs: Sequence[Any], labels: Any, weights: Any) -> list[Done]:
        """Run one batch through all chunks and return what each one ended with."""
        self._outputs = list(inputs)
        for stage in self._stages:
            entering = self._behind_the_finished(self._outputs)
            self._steps[stage.index] = train_step(stage, entering, labels, weights)
            self._advance(stage.index, None)
        missing = [stage.index for stage in self._stages if stage.index not in self._done]
        if missing:
            raise InvariantError(f"chunks {missing} never got their cotangents: a bug, report it")
        return [self._done[stage.index] for stage in self._stages]

    def _behind_the_finished(self, tensors: list[Any]) -> list[Any]:
        if not self._ordered or not self._finished:
            return tensors
        with tf.control_dependencies(self._finished):
            ordered = [tf.identity(tensor) for tensor in tensors]
        self._finished = []
        return ordered

    def _advance(self, index: int, answer: list[Any] | None) -> None:
        """Run a chunk's step on until it waits or ends, and whoever waits for what it gives."""
        while True:
            with self._stages[index].on_device():
                event = self._steps[index].send(answer)
            answer = None
            match event:
                case Forward(outputs):
                    self._outputs = outputs
                case Back(window, cotangents):
                    self._mail[index - 1, window] = cotangents
                    if self._waiting.get(index - 1) == window:
                        del self._waiting[index - 1]
                        self._advance(index - 1, self._mail.pop((index - 1, window)))
                case Need(window):
                    if (index, window) not in self._mail:
                        self._waiting[index] = window
                        return
                    answer = self._mail.pop((index, window))
                case Done() as done:
                    self._done[index] = done
                    self._finished.extend(done.gradients)
                    return
