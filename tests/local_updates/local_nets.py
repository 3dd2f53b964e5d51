"""Small networks and data that the tests of local updates share."""

from __future__ import annotations

import hashlib

import keras
import numpy as np


def digest(model):
    """SHA-256 of all weights and states of a model."""
    return hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in model.variables)).hexdigest()


def data(examples=96, width=16, classes=5, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(examples, width)).astype("float32")
    return x, random.integers(0, classes, examples).astype("int32")


def mlp(*, depth=3, width=32, inputs=16, classes=5, dropout=0.2, norm=True, regularizer=None):
    """Dense blocks with BatchNorm and Dropout: everything that carries state."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    tensor = entry = keras.Input((inputs,), name="x")
    for index in range(depth):
        tensor = layers.Dense(width, name=f"dense_{index}", kernel_regularizer=regularizer)(tensor)
        if norm:
            tensor = layers.BatchNormalization(name=f"norm_{index}")(tensor)
        tensor = layers.ReLU(name=f"relu_{index}")(tensor)
        if dropout:
            tensor = layers.Dropout(dropout, name=f"drop_{index}")(tensor)
    return keras.Model(entry, layers.Dense(classes, name="logits")(tensor), name="mlp")


def residual():
    """A small residual network: skips must not be parted by accident."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    entry = keras.Input((8, 8, 3), name="image")
    tensor = layers.Conv2D(8, 3, padding="same", name="stem")(entry)
    for index in range(3):
        inner = layers.Conv2D(8, 3, padding="same", name=f"conv_{index}a", use_bias=False)(tensor)
        inner = layers.BatchNormalization(name=f"norm_{index}")(inner)
        inner = layers.ReLU(name=f"relu_{index}")(inner)
        inner = layers.Conv2D(8, 3, padding="same", name=f"conv_{index}b")(inner)
        tensor = layers.Add(name=f"add_{index}")([tensor, inner])
    tensor = layers.GlobalAveragePooling2D(name="pool")(tensor)
    return keras.Model(entry, layers.Dense(5, name="logits")(tensor), name="residual")


def losses():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(trainer, optimizer="adam", **options):
    trainer.compile(optimizer=optimizer, loss=losses(), metrics=["accuracy"], **options)
    return trainer
