"""Holds what one chunk needs to train: its block, its exit (head, loss, metrics), its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from tflms.local_updates.plan import ChunkNet
from tflms.local_updates.windows import Window


class Exit(keras.Model):
    """A loss behind a chunk: the head (none behind the last chunk) with compiled loss and metrics.

    Args:
        head: model from the chunk's main output to predictions, or None to take it as it is.
    """

    def __init__(self, head: Any | None, *, name: str) -> None:
        super().__init__(name=name)
        self.head = head
        self.built = True

    def call(self, outputs: Any, training: bool = False) -> Any:
        """Return predictions from the chunk's main output."""
        return outputs if self.head is None else self.head(outputs, training=training)

    def local_loss(self, loss: Any, inputs: Sequence[Any], features: Any, labels: Any) -> Any:
        """Return the loss with what the head's own ``local_loss`` adds to it, if it has one.

        Args:
            loss: the task loss of a batch.
            inputs: the tensors that entered the chunk; they are data, no gradient passes them.
            features: the chunk's output that the head reads.
            labels: the batch's labels.
        """
        own = getattr(self.head, "local_loss", None)
        if own is None:
            return loss
        data = [tf.stop_gradient(tensor) for tensor in inputs]
        return loss + tf.cast(own(data, features, labels), loss.dtype)

    def track_loss(self, loss: Any, *, examples: Any) -> None:
        """Add a batch's loss to the running mean that is reported as ``loss``."""
        # Keras divides a loss by the number of replicas: undo it for the report, as fit() does.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        shown = loss if replicas == 1 else loss * replicas
        self.metrics[0].update_state(shown, sample_weight=examples)

    def results(self) -> dict[str, Any]:
        """Return the metrics by name, the loss first."""
        return dict(self.get_metrics_result())


class Stage:
    """One chunk at work.

    Attributes:
        index: the chunk's position.
        block: Keras model of the chunk.
        routes: how each leaving tensor comes about, see ``ChunkNet``.
        exit: the loss behind the chunk, or None.
        windows: the windows that hold the chunk, by their end.
        optimizer: the chunk's own optimizer, set by ``LocalTrainer.compile``.
        kept_metrics: running sums from a checkpoint that wait for their variables.
        device: TensorFlow device for the chunk's step, or None.
    """

    def __init__(
        self,
        index: int,
        net: ChunkNet,
        exit_: Exit | None,
        windows: Sequence[Window],
        *,
        device: str | None,
    ) -> None:
        self.index = index
        self.block = net.model
        self.routes = net.routes
        self.exit = exit_
        self.windows = tuple(windows)
        self.optimizer: Any = None
        self.kept_metrics: list[Any] = []
        self.device = device

    def with_block(self, block: Any) -> Stage:
        """Return a chunk like this one around another block (a copy of its own)."""
        stage = Stage(
            self.index, ChunkNet(block, self.routes), self.exit, self.windows, device=self.device
        )
        stage.optimizer = self.optimizer
        return stage

    def recorded_by(self, optimizer: Any, windows: Sequence[Window]) -> Stage:
        """Return this chunk under other windows and another optimizer; weights are shared."""
        mine = [window for window in windows if window.first <= self.index <= window.last]
        ends = any(window.last == self.index for window in mine)
        stage = Stage(
            self.index,
            ChunkNet(self.block, self.routes),
            self.exit if ends else None,
            mine,
            device=self.device,
        )
        stage.optimizer = optimizer
        return stage

    @property
    def own_window(self) -> Window | None:
        """The window whose loss lies behind this chunk."""
        return next((w for w in self.windows if w.last == self.index), None)

    @property
    def sends_back(self) -> bool:
        """Whether a window reaches from this chunk to the one before it."""
        return any(window.first < self.index for window in self.windows)

    def on_device(self) -> Any:
        """Return a context for the chunk's device; without one, that of the caller stays."""
        return nullcontext() if self.device is None else tf.device(self.device)

    @property
    def trainable(self) -> list[Any]:
        """The variables that this chunk's optimizer updates: the block's, then the head's."""
        head = [] if self.exit is None else list(self.exit.trainable_variables)
        return [*(self.block.trainable_variables if self.windows else []), *head]

    def variables(self) -> list[Any]:
        """Return every variable that decides how this chunk goes on, each once, in order."""
        found = list(self.block.variables)
        if self.exit is not None:
            found += list(self.exit.variables)
        if self.optimizer is not None:
            found += list(self.optimizer.variables)
        for layer in [self.block, *([self.exit] if self.exit is not None else [])]:
            found += seed_states(layer)
        return list({id(variable): variable for variable in found}.values())

    def metric_variables(self) -> list[Any]:
        """Return the running sums of the exit's metrics; Keras makes them with the first batch."""
        if self.exit is None:
            return []
        return [variable for metric in self.exit.metrics for variable in metric.variables]

    def restore_metrics(self) -> None:
        """Set the running sums that a checkpoint holds, once their variables exist."""
        kept, self.kept_metrics = self.kept_metrics, []
        for variable, value in zip(self.metric_variables(), kept, strict=True):
            variable.assign(value)

    def forward(self, inputs: Sequence[Any], *, training: bool) -> list[Any]:
        """Return the tensors that leave the chunk."""
        arguments = list(inputs) if len(self.block.inputs) > 1 else inputs[0]
        made = keras.tree.flatten(self.block(arguments, training=training))
        source = {"in": inputs, "out": made}
        return [source[kind][position] for kind, position in self.routes]

    def main(self, outputs: Sequence[Any]) -> Any:
        """Return the leaving tensor that heads read: the last one that the chunk itself made."""
        made = [
            tensor
            for tensor, (kind, _) in zip(outputs, self.routes, strict=True)
            if kind == "out" and tf.as_dtype(tensor.dtype).is_floating
        ]
        return made[-1]


def seed_states(layer: Any) -> list[Any]:
    """Return the state variables of the random generators inside a layer (dropout's seeds)."""
    return [
        generator.state
        for inner in layer._flatten_layers()
        for generator in getattr(inner, "_seed_generators", ())
    ]


def examples_in(tensors: Any) -> Any:
    """Return the batch size of the first tensor of a nest, as a tensor."""
    return tf.shape(keras.tree.flatten(tensors)[0])[0]
