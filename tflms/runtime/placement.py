"""Checks device names against the devices that TensorFlow could use, without creating any."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context

from tflms.config import Config
from tflms.errors import ConfigError
from tflms.planning.cost import device_kind, short_device


def check_devices(config: Config) -> None:
    """Check that ``device`` and ``host_device`` can exist in this process.

    Physical devices are listed, which does not initialise them.

    Raises:
        ConfigError: a name cannot be read, or there is no device of that kind.
    """
    kinds = {device.device_type.upper() for device in tf.config.list_physical_devices()} | {"CPU"}
    for key in ("device", "host_device"):
        name = getattr(config, key)
        if name is None:
            continue
        try:
            spec = tf.DeviceSpec.from_string(name)
        except ValueError as error:
            raise ConfigError(f"{key} is {name!r}: {error}") from None
        kind = (spec.device_type or "").upper()
        if not kind or kind not in kinds:
            raise ConfigError(
                f"{key} is {name!r} ({short_device(name) or 'no device'}); this process has "
                f"{', '.join(sorted(kinds))}"
            )


def default_kind() -> str:
    """Return the kind of device for operations that name none, as far as it can be known now.

    That is the one of an eager ``tf.device`` scope, in which a function is called; otherwise an
    accelerator where there is one, as TensorFlow prefers those. Operations of functions mostly
    name none.
    """
    scope = context.context().device_name
    if scope and (kind := device_kind(scope)):
        return kind
    kinds = {device.device_type.upper() for device in tf.config.get_visible_devices()}
    return "GPU" if "GPU" in kinds else min(kinds - {"CPU"}, default="CPU")
