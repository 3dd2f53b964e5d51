"""A recurrent network whose steps are unrolled: backpropagation through time without a loop."""

from __future__ import annotations

from typing import Any

from tflms.errors import ConfigError

CELLS = ("gru", "lstm", "simple")


def recurrent(
    steps: int = 64,
    width: int = 256,
    *,
    layers: int = 1,
    cell: str = "lstm",
    unroll: bool = True,
    features: int = 32,
    classes: int = 10,
    seed: int = 0,
) -> Any:
    """Return a recurrent classifier of series.

    Args:
        steps: length of a series.
        width: units of the cell.
        layers: recurrent layers, one on the other.
        cell: ``"lstm"``, ``"gru"`` or ``"simple"``.
        unroll: one copy of the cell per step; otherwise a loop.
        features: numbers per step of the input.
        classes: number of labels.
        seed: of the weights.

    Raises:
        ConfigError: there is no such cell.
    """
    import keras

    kinds = {
        "gru": keras.layers.GRU,
        "lstm": keras.layers.LSTM,
        "simple": keras.layers.SimpleRNN,
    }
    if cell not in kinds:
        raise ConfigError(f"no recurrent cell {cell!r}; choose one of {', '.join(CELLS)}")
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input([steps, features])
    for layer in range(layers):
        x = kinds[cell](width, unroll=unroll, return_sequences=layer < layers - 1)(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(x), name=f"recurrent_{cell}")
