"""Training steps for the tests of functions: built twice from the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

EVERYTHING = {"min_swap_bytes": 0}  # the layers are small


@dataclass
class Net:
    """Layers of tanh with their weights; ``step`` is one step of gradient descent."""

    width: int = 16
    depth: int = 5
    seed: int = 0
    weights: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = np.random.RandomState(self.seed)
        for _ in range(self.depth):
            values = random.standard_normal([self.width, self.width]) / np.sqrt(self.width)
            self.weights.append(tf.Variable(values.astype(np.float32)))

    def forward(self, x: Any) -> Any:
        for weight in self.weights:
            x = tf.tanh(tf.matmul(x, weight))
        return x

    def step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.forward(x) ** 2)
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(0.5 * gradient)
        return loss


def batch(size: int = 8, width: int = 16, seed: int = 1) -> Any:
    return tf.constant(np.random.RandomState(seed).standard_normal([size, width]), tf.float32)


def train(step: Callable[[Any], Any], net: Net, batches: list[Any]) -> list[bytes]:
    """Run a step on each batch; return all losses and final weights as bytes."""
    losses = [np.asarray(step(x)).tobytes() for x in batches]
    return losses + [weight.numpy().tobytes() for weight in net.weights]
