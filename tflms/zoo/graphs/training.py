"""What every training graph of the zoo is made of: seeded variables, an optimizer, feeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tflms.errors import ConfigError

Array = npt.NDArray[Any]
Feed = Array | Callable[[int], Array]
Optimizer = Callable[[Any], Any]  # loss -> train op


@dataclass(frozen=True, slots=True)
class TrainingGraph:
    """A finished training graph and what a session needs to run it.

    Attributes:
        graph: the ``tf.Graph``.
        loss: the scalar tensor that is minimised.
        train_op: the operation that does one step.
        init_op: the operation that initialises all variables; seeded, so always the same.
        feeds: placeholder -> array, or a function from the step's number to an array.
        outputs: what the network predicts.
        activations: the large values that the backward phase reads again, in forward order.
    """

    graph: Any
    loss: Any
    train_op: Any
    init_op: Any
    feeds: Mapping[Any, Feed]
    outputs: Any
    activations: tuple[Any, ...]

    def feed_dict(self, step: int = 0) -> dict[Any, Array]:
        """Return what to feed at a step."""
        return {key: feed(step) if callable(feed) else feed for key, feed in self.feeds.items()}


class Variables:
    """Makes the variables of one network; each has a seed of its own, counted from ``seed``."""

    def __init__(self, seed: int) -> None:
        self._next_seed = seed

    def normal(self, name: str, shape: list[int], *, stddev: float) -> Any:
        """Return a trainable resource variable that starts with normal noise."""
        import tensorflow as tf

        seed = self._next_seed
        self._next_seed += 1
        return tf.compat.v1.get_variable(
            name,
            shape,
            use_resource=True,
            initializer=tf.compat.v1.random_normal_initializer(stddev=stddev, seed=seed),
        )

    def kernel(self, name: str, shape: list[int]) -> Any:
        """Return a convolution's kernel, started after He et al. 2015 (variance 2 / fan-in)."""
        fan_in = int(np.prod(shape[:-1]))
        return self.normal(name, shape, stddev=float(np.sqrt(2.0 / fan_in)))

    def constant(self, name: str, shape: list[int], value: float, *, trainable: bool = True) -> Any:
        """Return a resource variable that starts as a constant."""
        import tensorflow as tf

        return tf.compat.v1.get_variable(
            name,
            shape,
            use_resource=True,
            trainable=trainable,
            initializer=tf.compat.v1.constant_initializer(value),
        )


@contextlib.contextmanager
def new_graph(device: str | None) -> Iterator[Any]:
    """Yield a fresh graph in which everything, variables too, is placed on ``device``."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph, graph.device(device):
        yield graph


def optimizer(name: str, learning_rate: float) -> Optimizer:
    """Return what makes the train op: ``"sgd"``, ``"momentum"`` (0.9) or ``"adam"``.

    Raises:
        ConfigError: the name is none of these.
    """
    import tensorflow as tf

    train = tf.compat.v1.train
    if name == "sgd":
        made = train.GradientDescentOptimizer(learning_rate)
    elif name == "momentum":
        made = train.MomentumOptimizer(learning_rate, 0.9)
    elif name == "adam":
        made = train.AdamOptimizer(learning_rate)
    else:
        raise ConfigError(f"no optimizer {name!r}; write 'sgd', 'momentum' or 'adam'")

    def minimize(loss: Any) -> Any:
        updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(updates):
            return made.minimize(loss)

    return minimize
