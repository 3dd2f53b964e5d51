"""Knows what a batch of ``fit`` holds: the model's inputs, one tensor of labels, weights."""

from __future__ import annotations

from typing import Any

import keras

from tflms.errors import ConfigError


def unpack_batch(data: Any) -> tuple[list[Any], Any, Any]:
    """Return a batch's input tensors, its labels, and its example weights or None.

    Raises:
        ConfigError: there are no labels, or several.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    labels = [] if y is None else keras.tree.flatten(y)
    if not labels:
        raise ConfigError("local updates compare every chunk with labels; give fit() y, or (x, y)")
    if len(labels) != 1:
        raise ConfigError(f"labels are a structure of {len(labels)} tensors; give one")
    given = [] if weights is None else keras.tree.flatten(weights)
    if len(given) > 1:
        raise ConfigError(f"example weights are a structure of {len(given)} tensors; give one")
    return keras.tree.flatten(x), labels[0], given[0] if given else None
