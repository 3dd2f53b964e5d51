"""Reads predictions out of the exits: their ensemble, or a plain model that ends at one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tflms.errors import ConfigError

EXITS = ("last", "all", "ensemble")


def ensemble(predictions: Sequence[Any]) -> Any:
    """Return the weighted mean of the exits' predictions; each exit weighs twice the one before.

    The weights are those of the validation in eugenium/DGL (2^n).
    """
    weights = [2.0**position for position in range(len(predictions))]
    parts = [
        tf.cast(prediction, tf.float32) * (weight / sum(weights))
        for prediction, weight in zip(predictions, weights, strict=True)
    ]
    return tf.add_n(parts)


def exit_model(trainer: Any, index: int | None) -> Any:
    """Return the plain Keras model from the inputs to one exit, sharing the weights."""
    count = len(trainer.stages)
    if index is None or index in (count - 1, -1):
        return trainer.source
    with_exit = [stage.index for stage in trainer.stages if stage.exit is not None]
    if index not in with_exit:
        raise ConfigError(f"chunk {index} has no exit; exits lie behind the chunks {with_exit}")
    inputs = [
        keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=f"{tensor.name}_exit")
        for tensor in trainer.source.inputs
    ]
    tensors: list[Any] = list(inputs)
    for stage in trainer.stages[: index + 1]:
        leaving = stage.forward(tensors, training=False)
        main = stage.main(leaving)
        tensors = leaving
    return keras.Model(_single(inputs), trainer.stages[index].exit.head(main), name=f"exit_{index}")


def _single(tensors: list[Any]) -> Any:
    """Return the tensor of a list of one, as Keras wants a model's only input."""
    return tensors[0] if len(tensors) == 1 else tensors
