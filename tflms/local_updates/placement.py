"""Knows the devices of chunks: whether they exist, and how Keras variables get there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tflms.errors import ConfigError


def check_devices(devices: Sequence[str], *, chunks: int, here: bool) -> None:
    """Refuse devices that are none; TensorFlow would take the CPU in their place, in silence.

    Args:
        devices: one per chunk.
        chunks: how many chunks there are.
        here: whether they must all be in this process.
    """
    if isinstance(devices, str) or len(devices) != chunks:
        count = 1 if isinstance(devices, str) else len(devices)
        raise ConfigError(f"devices= lists {count} devices for {chunks} chunks")
    found = [tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices()]
    known = {(spec.device_type, spec.device_index) for spec in found}
    for device in devices:
        try:
            spec = tf.DeviceSpec.from_string(device)
        except ValueError:
            raise ConfigError(f"devices= lists {device!r}; write it like '/GPU:0'") from None
        wanted = (spec.device_type, spec.device_index or 0)
        if here and spec.job is None and spec.device_type and wanted not in known:
            names = ", ".join(f"/{s.device_type}:{s.device_index}" for s in found)
            raise ConfigError(f"devices= lists {device!r}, this process has {names}")


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
