"""Small Keras models with what makes recomputation hard, seeded, with data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.keras.nets import built, fit

BATCH = 64
L = keras.layers


def data(*shape: int, seed: int = 1) -> Any:
    return np.random.RandomState(seed).standard_normal([2 * BATCH, *shape]).astype("float32")


def dropout_and_statistics() -> tuple[Any, Any, Any]:
    """Several activations, batch normalization and dropout in turn."""
    inputs = x = keras.Input([32])
    for name in ("relu", "swish", "tanh", "gelu", "leaky_relu"):
        x = L.Dense(32, activation=name)(x)
        x = L.Dropout(0.2)(L.BatchNormalization()(x))
    return keras.Model(inputs, L.Dense(1)(x)), data(32), data(1, seed=2)


def tokens() -> tuple[Any, Any, Any]:
    """Embedding, attention with dropout, layer normalization, residual sums."""
    inputs = keras.Input([12], dtype="int32")
    x = L.Embedding(50, 16)(inputs)
    for _ in range(2):
        y = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(2, 8, dropout=0.1)(y, y)])
        y = L.Dense(32, activation="gelu")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dropout(0.1)(L.Dense(16)(y))])
    outputs = L.Dense(1)(L.GlobalAveragePooling1D()(x))
    ids = np.random.RandomState(1).randint(0, 50, [2 * BATCH, 12]).astype("int32")
    return keras.Model(inputs, outputs), ids, data(1, seed=2)


def convolutional() -> tuple[Any, Any, Any]:
    """Convolutions, pooling, dense layers and dropout, as VGG has them."""
    inputs = x = keras.Input([16, 16, 3])
    for _ in range(3):
        for _ in range(2):
            x = L.Conv2D(8, 3, padding="same", activation="relu")(x)
        x = L.MaxPooling2D()(x)
    x = L.Dropout(0.5)(L.Dense(32, activation="relu")(L.Flatten()(x)))
    return keras.Model(inputs, L.Dense(1)(x)), data(16, 16, 3), data(1, seed=2)


def frozen_first_layers() -> tuple[Any, Any, Any]:
    inputs = x = keras.Input([32])
    for number in range(8):
        layer = L.Dense(32, activation="tanh")
        layer.trainable = number >= 3
        x = layer(x)
    return keras.Model(inputs, L.Dense(1)(x)), data(32), data(1, seed=2)


def several_inputs_and_outputs() -> tuple[Any, Any, Any]:
    """Two inputs meet, one layer's result goes to two heads, two losses are added."""
    first, second = keras.Input([32]), keras.Input([8])
    x = L.Dense(32, activation="relu")(L.Concatenate()([first, L.Dense(8)(second)]))
    for _ in range(5):
        x = L.Add()([x, L.Dense(32, activation="tanh")(x)])
    heads = [L.Dense(1, name="a")(x), L.Dense(1, name="b")(L.Dense(8, activation="relu")(x))]
    labels = [data(1, seed=2), data(1, seed=3)]
    return keras.Model([first, second], heads), [data(32), data(8, seed=4)], labels


def mixed_precision() -> tuple[Any, Any, Any]:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return dropout_and_statistics()
    finally:
        keras.config.set_dtype_policy("float32")


def train(build: Any, *callbacks: Any) -> dict[str, bytes]:
    """Train two batches; all losses and weights, moving statistics too, as bytes."""
    settings: dict[str, Any] = {}
    if build is several_inputs_and_outputs:
        settings["loss"] = ["mse", "mse"]
    if build is mixed_precision:
        settings["optimizer"] = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    return fit(*built(build, **settings), *callbacks, batch_size=BATCH, epochs=1)
