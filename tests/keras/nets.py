"""Small Keras models of many kinds, seeded, with data; and training them to comparable bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

EVERYTHING = {"min_swap_bytes": 0, "batch_size": 4}
L = keras.layers


def data(*shape: int, seed: int = 1) -> Any:
    return np.random.RandomState(seed).standard_normal([8, *shape]).astype(np.float32)


def mlp() -> tuple[Any, Any, Any]:
    layers = [L.Dense(16, activation="tanh") for _ in range(5)]
    return keras.Sequential([keras.Input([16]), *layers, L.Dense(1)]), data(16), data(1, seed=2)


def convolutional() -> tuple[Any, Any, Any]:
    inputs = keras.Input([12, 12, 3])
    x = inputs
    for _ in range(2):
        x = L.Conv2D(6, 3, padding="same", use_bias=False)(x)
        x = L.ReLU()(L.BatchNormalization(momentum=0.8)(x))
        x = L.MaxPooling2D(2)(x)
    x = L.Dropout(0.3, seed=3)(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(1)(x)), data(12, 12, 3), data(1, seed=2)


def written_out() -> tuple[Any, Any, Any]:
    """Activations and normalizations of many small operations, whose gradients are sums."""
    inputs = keras.Input([8, 8, 4])
    x = inputs
    for _ in range(2):
        x = L.Conv2D(4, 3, padding="same", activation="swish")(x)
        x = L.LeakyReLU()(L.GroupNormalization(2)(L.Conv2D(4, 3, padding="same")(x)))
    return keras.Model(inputs, L.Dense(1)(L.Flatten()(x))), data(8, 8, 4), data(1, seed=2)


def shared() -> tuple[Any, Any, Any]:
    """One layer called three times, with a skip over it."""
    inputs = keras.Input([16])
    layer, norm = L.Dense(16, activation="tanh"), L.LayerNormalization()
    x = inputs
    for _ in range(3):
        x = L.Add()([x, layer(norm(x))])
    return keras.Model(inputs, L.Dense(1)(x)), data(16), data(1, seed=2)


def tokens() -> tuple[Any, Any, Any]:
    """Embedding with mask, LSTM, attention."""
    inputs = keras.Input([6], dtype="int32")
    x = L.Embedding(20, 8, mask_zero=True)(inputs)
    x = L.LSTM(8, return_sequences=True)(x)
    x = L.Add()([x, L.MultiHeadAttention(2, 4)(x, x)])
    x = L.Dense(1)(L.GlobalAveragePooling1D()(L.LayerNormalization()(x)))
    ids = np.random.RandomState(1).randint(0, 20, [8, 6]).astype(np.int32)
    return keras.Model(inputs, x), ids, data(1, seed=2)


class Subclassed(keras.Model):
    """Written by hand, with a branch that Python decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = [L.Dense(16, activation="relu") for _ in range(4)]
        self.last = L.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        for layer in self.first:
            x = layer(x) + (0.5 * x if training else x)
        return self.last(x)


def subclassed() -> tuple[Any, Any, Any]:
    return Subclassed(), data(16), data(1, seed=2)


class Gan(keras.Model):
    """Two optimizers in one custom train_step; the generator is trained after its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([L.Dense(16, activation="tanh") for _ in range(4)])
        layers = [L.Dense(16, activation="relu") for _ in range(3)]
        self.critic = keras.Sequential([*layers, L.Dense(1)])

    def compile(self, **settings: Any) -> None:
        super().compile(optimizer="sgd", **settings)
        self.generator_optimizer = keras.optimizers.Adam(1e-2)
        self.critic_optimizer = keras.optimizers.SGD(0.05)

    def call(self, x: Any) -> Any:
        return self.critic(self.generator(x))

    def train_step(self, data: Any) -> Any:
        noise = real = data[0]
        with tf.GradientTape() as tape:
            critic_loss = tf.reduce_mean((self.critic(real) - 1.0) ** 2) + tf.reduce_mean(
                self.critic(self.generator(noise)) ** 2
            )
        weights = self.critic.trainable_weights
        gradients = tape.gradient(critic_loss, weights)
        self.critic_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.critic(self.generator(noise)) - 1.0) ** 2)
        weights = self.generator.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.generator_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "critic": critic_loss}


def gan() -> tuple[Any, Any, Any]:
    return Gan(), data(16), data(1, seed=2)


Build = Callable[[], tuple[Any, Any, Any]]


def built(build: Build, **settings: Any) -> tuple[Any, Any, Any]:
    """Build and compile with equal seeds."""
    keras.utils.set_random_seed(7)
    model, x, y = build()
    if not isinstance(model, Gan):
        settings.setdefault("optimizer", keras.optimizers.Adam(1e-2))
        settings.setdefault("loss", "mse")
    settings.setdefault("jit_compile", False)
    model.compile(**settings)
    return model, x, y


def outcome(model: Any, history: Any) -> dict[str, bytes]:
    """All losses and weights of a training, as bytes."""
    found = {key: np.asarray(values).tobytes() for key, values in history.history.items()}
    return found | {f"w{i}": w.tobytes() for i, w in enumerate(model.get_weights())}


def fit(model: Any, x: Any, y: Any, *callbacks: Any, **settings: Any) -> dict[str, bytes]:
    settings = {"epochs": 2, "batch_size": 4, **settings}
    history = model.fit(x, y, shuffle=False, verbose=0, callbacks=list(callbacks), **settings)
    return outcome(model, history)
