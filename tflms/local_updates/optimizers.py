"""Gives each chunk its own optimizer, made from the one that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tflms.errors import ConfigError


def optimizers_for(optimizer: Any, *, chunks: int) -> list[Any]:
    """Return one optimizer per chunk.

    The last chunk gets the given object (callbacks find it as ``trainer.optimizer``), the others
    get copies of its settings.

    Raises:
        ConfigError: a list of the wrong length, or the same object twice.
    """
    if isinstance(optimizer, (list, tuple)):
        found = [keras.optimizers.get(entry) for entry in optimizer]
        if len(found) != chunks:
            raise ConfigError(
                f"optimizer= lists {len(found)} optimizers for {chunks} chunks; give one per chunk"
            )
        if len({id(entry) for entry in found}) != chunks:
            raise ConfigError("optimizer= lists one optimizer twice; each chunk needs its own")
        return found
    last = keras.optimizers.get(optimizer)
    return [*[copy_of(last) for _ in range(chunks - 1)], last]


def copy_of(optimizer: Any) -> Any:
    """Return a fresh optimizer with the same settings and no state."""
    return type(optimizer).from_config(optimizer.get_config())


def has_plain_rate(optimizer: Any) -> bool:
    """Whether the learning rate is a value that callbacks may set (not a schedule)."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return not isinstance(inner._learning_rate, keras.optimizers.schedules.LearningRateSchedule)


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate that a callback may have set, or None for a schedule."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return float(tf.convert_to_tensor(inner.learning_rate)) if has_plain_rate(inner) else None


def set_learning_rate(optimizers: Sequence[Any], rate: float | None) -> None:
    """Set the learning rate of each optimizer that has a plain one."""
    if rate is None:
        return
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if has_plain_rate(inner) and learning_rate(inner) != rate:
            inner.learning_rate = rate


def check_optimizer(trainer: Any, optimizer: Any) -> None:
    """Refuse optimizer settings that would see one chunk where they mean the network."""
    if len(trainer.stages) == 1:
        return
    if getattr(optimizer, "use_ema", False):
        raise ConfigError("use_ema=True: Keras averages one optimizer's weights; use one chunk")
    wide = any(window.first != window.last for window in trainer.windows)
    if wide and getattr(optimizer, "global_clipnorm", None):
        raise ConfigError(
            f"global_clipnorm= would see one chunk's gradients only under "
            f"method={trainer.method!r}; use clipnorm= or clipvalue="
        )
    if wide and trainer.source.dtype_policy.name == "mixed_float16":
        raise ConfigError(
            f"mixed_float16 scales each chunk's loss by itself, method={trainer.method!r} sends "
            "gradients between chunks; use mixed_bfloat16, or method='chunked' or 'greedy'"
        )
