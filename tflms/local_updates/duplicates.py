"""Overlapping windows as the paper runs them: each trains a copy, and the copies are averaged.

With plain descent this equals averaging the gradients; with Adam it does not, since each copy has
its own moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tflms.errors import ConfigError
from tflms.local_updates.fused import FusedRuntime
from tflms.local_updates.optimizers import copy_of
from tflms.local_updates.stage import Stage
from tflms.local_updates.windows import Window


class DuplicatesRuntime(FusedRuntime):
    """All windows in one graph, each with copies of the blocks that later windows own.

    The last window that holds a block owns it: its copy is the model's own, and its output is what
    goes on to later windows.

    Args:
        trainer: the trainer.
        sync_every: steps between two averages.
    """

    def __init__(self, trainer: Any, *, sync_every: int) -> None:
        super().__init__(trainer)
        self._sync_every = sync_every
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
        windows: Sequence[Window] = trainer.windows
        self._owner = {
            stage.index: max(
                number
                for number, window in enumerate(windows)
                if window.first <= stage.index <= window.last
            )
            for stage in trainer.stages
        }
        self._blocks: dict[tuple[int, int], Any] = {}
        for number, window in enumerate(windows):
            for index in range(window.first, window.last + 1):
                block = trainer.stages[index].block
                if self._owner[index] != number:
                    copy = keras.models.clone_model(block)
                    copy.set_weights(block.get_weights())
                    block = copy
                self._blocks[number, index] = block
        self._optimizers: list[Any] = []

    def compiled(self) -> None:
        """Give each window an optimizer for its copies and its head."""
        trainer = self.trainer
        self._optimizers = []
        for number, window in enumerate(trainer.windows):
            optimizer = copy_of(trainer.stages[window.last].optimizer)
            optimizer.build(self._variables(number))
            self._optimizers.append(optimizer)

    def optimizers(self) -> list[Any]:
        """Return the optimizers whose learning rate follows the trainer's."""
        return self._optimizers

    def save(self, path: str, *, batch: int, done: Callable[[], None]) -> None:
        """Refuse: the copies between two averages are not saved."""
        raise ConfigError("checkpoints need form='cotangent'; form='duplicates' has none")

    def _variables(self, number: int) -> list[Any]:
        window = self.trainer.windows[number]
        found = [
            variable
            for index in range(window.first, window.last + 1)
            for variable in self._blocks[number, index].trainable_variables
        ]
        return [*found, *self.trainer.stages[window.last].exit.trainable_variables]

    def step(self, inputs: Sequence[Any], labels: Any, weights: Any) -> None:
        """Train every window on one batch, then average the copies when it is time."""
        entering = {0: list(inputs)}
        finished: list[Any] = []
        for number in range(len(self.trainer.windows)):
            finished = self._train_window(number, entering, finished, labels, weights)
        self._count.assign_add(1)
        if self._sync_every == 1:
            self._average(finished)
        else:
            due = tf.equal(self._count % self._sync_every, 0)
            tf.cond(due, lambda: self._average(finished), lambda: tf.constant(0))

    def _train_window(
        self,
        number: int,
        entering: dict[int, list[Any]],
        finished: list[Any],
        labels: Any,
        weights: Any,
    ) -> list[Any]:
        window = self.trainer.windows[number]
        with tf.control_dependencies(finished):
            tensors = [tf.identity(tensor) for tensor in entering[window.first]]
        exit_ = self.trainer.stages[window.last].exit
        penalties: list[Any] = []
        with tf.GradientTape() as tape:
            for index in range(window.first, window.last + 1):
                stage, inputs = self._stage_with(number, index), tensors
                tensors = stage.forward(tensors, training=True)
                penalties += [tf.reduce_sum(penalty) for penalty in stage.block.losses]
                if self._owner[index] == number:
                    entering[index + 1] = [tf.stop_gradient(tensor) for tensor in tensors]
            features = self.trainer.stages[window.last].main(tensors)
            predictions = exit_(features, training=True)
            loss = exit_.compute_loss(
                x=None, y=labels, y_pred=predictions, sample_weight=weights, training=True
            )
            loss = exit_.local_loss(loss, inputs, features, labels)
            total = tf.add_n([loss, *penalties]) if penalties else loss
        variables = self._variables(number)
        gradients = tape.gradient(total, variables)
        self._optimizers[number].apply_gradients(zip(gradients, variables, strict=True))
        exit_.track_loss(total, examples=tf.shape(predictions)[0])
        exit_.compute_metrics(None, labels, predictions, sample_weight=weights)
        return [gradient for gradient in gradients if gradient is not None]

    def _stage_with(self, number: int, index: int) -> Stage:
        """Return the chunk with this window's copy of its block."""
        original = self.trainer.stages[index]
        block = self._blocks[number, index]
        return original if block is original.block else original.with_block(block)

    def _average(self, after: list[Any]) -> Any:
        """Set all copies of a block to the mean of their weights, their states to the owner's."""
        with tf.control_dependencies(after):
            for index, owner in self._owner.items():
                own = self._blocks[owner, index]
                copies = [
                    block
                    for (number, other), block in self._blocks.items()
                    if other == index and number != owner
                ]
                if not copies:
                    continue
                groups = zip(
                    own.trainable_variables,
                    *(copy.trainable_variables for copy in copies),
                    strict=True,
                )
                for group in groups:
                    mean = tf.add_n([tf.convert_to_tensor(v) for v in group]) / len(group)
                    for variable in group:
                        variable.assign(mean)
                for copy in copies:
                    states = zip(
                        own.non_trainable_variables, copy.non_trainable_variables, strict=True
                    )
                    for source, target in states:
                        target.assign(source)
        return tf.constant(0)
