"""Hundreds of dense layers around a residual stream: deep, with little work in each layer."""

from __future__ import annotations

from typing import Any


def residual_mlp(layers: int = 200, width: int = 256, *, classes: int = 10, seed: int = 0) -> Any:
    """Return ``layers`` pre-normalized residual dense layers for vectors of ``width`` features.

    Args:
        layers: dense layers in the residual stream.
        width: features of the input and of every layer.
        classes: number of labels.
        seed: of the weights.
    """
    import keras

    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input([width])
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(width, activation="relu")(y)
        x = keras.layers.Add()([x, y])
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(x), name="residual_mlp")
