"""Builds the auxiliary heads: small models from a chunk's output to the space of the task loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tflms.errors import ConfigError

HEADS = ("pool_linear", "mlp", "conv", "lm_linear", "lm_lowrank", "lm_tied")
_UPSAMPLING = (
    keras.layers.UpSampling1D,
    keras.layers.UpSampling2D,
    keras.layers.UpSampling3D,
)
HEAD_OPTIONS = ("hidden", "initializer", "rank", "table")


class TiedReadOut(keras.layers.Layer):
    """Logits by a table that other chunks train: read, never updated from here.

    Args:
        table: the weight to read, of shape (vocabulary, width) or, transposed, (width, vocabulary).
    """

    def __init__(self, table: Any, **options: Any) -> None:
        super().__init__(**options)
        self._table = [lambda: table]  # in a closure, so that Keras does not track it as ours

    def call(self, inputs: Any) -> Any:
        """Return ``inputs . table^T`` with no gradient into the table."""
        table = keras.ops.stop_gradient(keras.ops.convert_to_tensor(self._table[0]()))
        table = keras.ops.cast(table, self.compute_dtype)
        if table.shape[-1] == inputs.shape[-1]:
            table = keras.ops.transpose(table)
        return keras.ops.matmul(inputs, table)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Return the input's shape with the vocabulary as last size."""
        shape = self._table[0]().shape
        vocabulary = shape[0] if shape[-1] == input_shape[-1] else shape[-1]
        return (*input_shape[:-1], vocabulary)


def make_head(
    kind: str | Callable[..., Any],
    shape: Sequence[int | None],
    *,
    outputs: Any,
    dtype: str = "float32",
    initializer: str = "task",
    rank: int = 64,
    hidden: int = 128,
    table: Any = None,
    name: str = "head",
) -> Any:
    """Return the head behind one chunk.

    Args:
        kind: a name from ``HEADS``, or a function from the chunk's output shape to a Keras model
            or layer.
        shape: shape of the chunk's (first) output with the batch dimension.
        outputs: the symbolic output of the whole model; gives the size and activation of the head.
        dtype: dtype of the chunk's output.
        initializer: ``"task"`` draws the last kernel as the layers' default does, ``"zero"`` starts
            with logits of zero.
        rank: inner width of ``lm_lowrank``.
        hidden: inner width of ``mlp`` and ``conv``.
        table: the weight that ``lm_tied`` reads.
        name: name of the head's model.

    Raises:
        ConfigError: the kind does not exist or does not fit the shape.
    """
    if callable(kind):
        return _called(kind, shape, dtype=dtype, name=name)
    if kind not in HEADS:
        raise ConfigError(f"heads={kind!r} is unknown; use {', '.join(HEADS)} or a function")
    if initializer not in ("task", "zero"):
        raise ConfigError(f"initializer={initializer!r} is unknown; use 'task' or 'zero'")
    size = outputs.shape[-1]
    activation = _activation_of(outputs)
    factors: tuple[int, ...] = ()
    last = "zeros" if initializer == "zero" else "glorot_uniform"
    inputs = keras.Input(batch_shape=(None, *shape[1:]), dtype=dtype)
    if kind.startswith("lm_"):
        if len(shape) != 3:
            raise ConfigError(
                f"head {kind!r} reads (batch, positions, width), the chunk gives {tuple(shape)}"
            )
        x = keras.layers.LayerNormalization()(inputs)
        if kind == "lm_tied":
            if table is None:
                raise ConfigError("head 'lm_tied' needs table=, the embedding or output weight")
            x = TiedReadOut(table)(x)
            if activation is not None:
                x = keras.layers.Activation(activation)(x)
            return keras.Model(inputs, x, name=name)
        if kind == "lm_lowrank":
            x = keras.layers.Dense(rank, use_bias=False)(x)
    elif kind == "conv":
        if len(shape) != 4:
            raise ConfigError(
                f"head 'conv' reads (batch, height, width, channels), not {tuple(shape)}"
            )
        x = keras.layers.Conv2D(hidden, 3, strides=2, padding="same", use_bias=False)(inputs)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(x)
        x = _pooled(x)
    else:
        # An output with positions (a language model, a segmentation) keeps them.
        if len(outputs.shape) > 2:
            factors = _larger(outputs.shape, shape, kind)
        x = inputs if factors else _pooled(inputs)
        if kind == "mlp":
            x = keras.layers.Dense(hidden, activation="relu")(x)
    x = keras.layers.Dense(
        size, activation=activation, kernel_initializer=last, dtype=outputs.dtype
    )(x)
    if any(factor > 1 for factor in factors):
        upsampling = _UPSAMPLING[len(factors) - 1]
        x = upsampling(factors[0] if len(factors) == 1 else factors)(x)
    return keras.Model(inputs, x, name=name)


def _larger(output: Sequence[Any], shape: Sequence[Any], kind: str) -> tuple[int, ...]:
    """Return by how much the output has more positions than the chunk's output, per axis.

    Raises:
        ConfigError: a head of this kind cannot lead from one to the other.
    """
    pairs = list(zip(output[1:-1], shape[1:-1], strict=False))
    if len(output) != len(shape) or any(large % small for large, small in pairs):
        raise ConfigError(
            f"head {kind!r} leads from {tuple(shape)} to no output of shape {tuple(output)}; give "
            "heads= a function from the chunk's output shape to a model, or move the cut"
        )
    return tuple(large // small for large, small in pairs)


def _pooled(x: Any) -> Any:
    rank = len(x.shape)
    if rank == 2:
        return x
    return keras.ops.mean(x, axis=tuple(range(1, rank - 1)))


def _activation_of(outputs: Any) -> Any:
    """Return the activation that ends the model, so that heads speak the same language."""
    layer = outputs._keras_history.operation
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    activation = getattr(layer, "activation", None)
    if activation is None or activation is keras.activations.linear:
        return None
    return activation


def _called(kind: Callable[..., Any], shape: Sequence[int | None], *, dtype: str, name: str) -> Any:
    head = kind(tuple(shape))
    if not isinstance(head, keras.layers.Layer):
        raise ConfigError(
            f"the heads function returned {type(head).__name__} for shape {tuple(shape)}; "
            "it must return a Keras model or layer"
        )
    if isinstance(head, keras.Model) and head.built:
        return head
    inputs = keras.Input(batch_shape=(None, *shape[1:]), dtype=dtype)
    model = keras.Model(inputs, head(inputs), name=name)
    if hasattr(head, "local_loss"):
        model.local_loss = head.local_loss
    return model
