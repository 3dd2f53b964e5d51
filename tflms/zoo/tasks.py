"""A model with what it takes to train it: a batch that fits its shapes, a loss, an optimizer."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tflms.errors import ConfigError
from tflms.zoo.models import BUILDERS

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A Keras model and one batch of examples for it.

    Attributes:
        name: of the model's builder.
        model: the Keras model; its outputs are logits.
        inputs: float32 or int32, ``[batch, ...]``.
        labels: int32, the model's output shape without its last dimension.
    """

    name: str
    model: Any
    inputs: Array
    labels: Array

    def compile(self, optimizer: Any = "sgd", **settings: Any) -> Any:
        """Compile the model with mean cross-entropy and return it.

        XLA is off unless asked for: it places everything on one device.
        """
        import keras

        settings.setdefault("jit_compile", False)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer=optimizer, loss=loss, **settings)
        return self.model


def task(name: str, *, batch: int, seed: int = 0, **settings: Any) -> Task:
    """Build a model by its name with a batch of noise to train on.

    Args:
        name: one of :data:`tflms.zoo.models.BUILDERS`.
        batch: number of examples.
        seed: of weights and examples.
        settings: for the builder, such as ``image=112`` or ``layers=12``.

    Raises:
        ConfigError: there is no such model.
    """
    if name not in BUILDERS:
        near = difflib.get_close_matches(name, BUILDERS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no model {name!r}; {hint}there are: {', '.join(BUILDERS)}")
    model = BUILDERS[name](seed=seed, **settings)
    inputs, labels = noise(model, batch=batch, seed=seed)
    return Task(name, model, inputs, labels)


def noise(model: Any, *, batch: int, seed: int = 0) -> tuple[Array, Array]:
    """Return random inputs and labels of the shapes that a model reads and predicts.

    Integer inputs are tokens out of as many as the model predicts.
    """
    random = np.random.RandomState(seed)
    classes = int(model.output_shape[-1])
    shape = [batch, *model.input_shape[1:]]
    inputs: Array
    if str(model.inputs[0].dtype).startswith("int"):
        inputs = random.randint(0, classes, shape).astype(np.int32)
    else:
        inputs = random.randn(*shape).astype(np.float32)
    labels = random.randint(0, classes, [batch, *model.output_shape[1:-1]]).astype(np.int32)
    return inputs, labels
