"""Moves Keras variables to the device of their chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def move_to(device: str, variables: Sequence[Any]) -> None:
    """Put each variable's storage on a device; all layers that hold the variable see it there.

    A step whose variables live elsewhere would copy every weight over the link twice a batch.
    """
    wanted = tf.DeviceSpec.from_string(device)
    for variable in variables:
        old = variable._value
        here = tf.DeviceSpec.from_string(old.device)
        if (here.device_type, here.device_index) == (wanted.device_type, wanted.device_index):
            continue
        with tf.init_scope(), tf.device(device):
            variable._value = tf.Variable(
                old.read_value(), dtype=old.dtype, trainable=old.trainable, name=variable.name
            )
