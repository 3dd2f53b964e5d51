"""Keras models: uncompiled, seeded, and with logits as output.

Every builder seeds Keras (``keras.utils.set_random_seed``, which also seeds ``random`` and numpy),
so that two builds have the same weights and the same dropout masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tflms.zoo.models.applications import (
    densenet121,
    inception_v3,
    mobilenet_v3,
    resnet50,
    vgg16,
)
from tflms.zoo.models.mlp import residual_mlp
from tflms.zoo.models.recurrent import recurrent
from tflms.zoo.models.residual import deep_resnet, resnet18, resnet101
from tflms.zoo.models.transformer import transformer
from tflms.zoo.models.unet3d import unet3d

BUILDERS: Mapping[str, Callable[..., Any]] = {
    "deep_resnet": deep_resnet,
    "densenet121": densenet121,
    "inception_v3": inception_v3,
    "mobilenet_v3": mobilenet_v3,
    "recurrent": recurrent,
    "residual_mlp": residual_mlp,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "transformer": transformer,
    "unet3d": unet3d,
    "vgg16": vgg16,
}
"""Every builder by its name; all settings have defaults."""

__all__ = ["BUILDERS", *BUILDERS]
