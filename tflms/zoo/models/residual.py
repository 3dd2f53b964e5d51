"""Residual networks built here: ResNet-18 and -101, and chains of any depth for small images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tflms.errors import ConfigError

Block = Callable[..., Any]  # (x, channels, *, stride) -> x

_EPSILON = 1e-5
_MOMENTUM = 0.9


def resnet18(image: int = 112, *, classes: int = 1000, seed: int = 0) -> Any:
    """Return ResNet-18 (He et al. 2016, table 1): two 3x3 convolutions per block."""
    return _imagenet(_basic, (2, 2, 2, 2), image=image, classes=classes, seed=seed)


def resnet101(image: int = 112, *, classes: int = 1000, seed: int = 0) -> Any:
    """Return ResNet-101 (He et al. 2016, table 1): 33 bottlenecks."""
    return _imagenet(_bottleneck, (3, 4, 23, 3), image=image, classes=classes, seed=seed)


def deep_resnet(
    depth: int = 164, *, image: int = 32, filters: int = 16, classes: int = 10, seed: int = 0
) -> Any:
    """Return a pre-activation ResNet for small images (He et al. 2016, "Identity mappings").

    Three stages of ``(depth - 2) / 9`` bottlenecks; the paper's deepest has 1001 layers. Each
    bottleneck is a model of its own: Keras walks a model's layers recursively, and a flat chain of
    1001 would pass Python's limit.

    Args:
        depth: number of convolutions and the dense layer; ``9 n + 2``, such as 11, 164 or 1001.
        image: edge of the square colour images in pixels.
        filters: channels inside a bottleneck of the first stage; it puts out four times as many.
        classes: number of labels.
        seed: of the weights.

    Raises:
        ConfigError: the depth is not ``9 n + 2``.
    """
    import keras

    blocks, rest = divmod(depth - 2, 9)
    if blocks < 1 or rest:
        near = 9 * max(blocks, 1) + 2
        raise ConfigError(f"depth is {depth}; it must be 9 n + 2, for example {near} or {near + 9}")
    keras.utils.set_random_seed(seed)
    layer = keras.layers
    inputs = keras.Input([image, image, 3])
    x = _conv(inputs, filters, 3)
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            name = f"stage{stage}_block{block}"
            x = _preactivated(x.shape[1:], filters << stage, stride=stride, name=name)(x)
    x = layer.GlobalAveragePooling2D()(_norm_relu(x))
    return keras.Model(inputs, layer.Dense(classes)(x), name=f"resnet{depth}")


def _imagenet(block: Block, stages: Sequence[int], *, image: int, classes: int, seed: int) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layer = keras.layers
    inputs = keras.Input([image, image, 3])
    x = _norm_relu(_conv(inputs, 64, 7, stride=2))
    x = layer.MaxPooling2D(3, strides=2, padding="same")(x)
    for stage, count in enumerate(stages):
        for i in range(count):
            x = block(x, 64 << stage, stride=2 if stage > 0 and i == 0 else 1)
    x = layer.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layer.Dense(classes)(x))


def _basic(x: Any, channels: int, *, stride: int) -> Any:
    """3x3, 3x3, added to the input or its projection."""
    y = _norm_relu(_conv(x, channels, 3, stride=stride))
    y = _norm(_conv(y, channels, 3))
    return _add_relu(y, _shortcut(x, channels, stride=stride))


def _bottleneck(x: Any, channels: int, *, stride: int) -> Any:
    """1x1, 3x3, 1x1 to four times the channels, added to the input or its projection."""
    y = _norm_relu(_conv(x, channels, 1))
    y = _norm_relu(_conv(y, channels, 3, stride=stride))
    y = _norm(_conv(y, 4 * channels, 1))
    return _add_relu(y, _shortcut(x, 4 * channels, stride=stride))


def _preactivated(shape: Sequence[int], channels: int, *, stride: int, name: str) -> Any:
    """A model: a bottleneck that normalizes before each convolution and leaves the sum alone."""
    import keras

    x = keras.Input(shape)
    y = _norm_relu(x)
    # Where the shape changes, the projection shares the first normalization (section 4.1).
    changes = stride != 1 or x.shape[-1] != 4 * channels
    shortcut = _conv(y, 4 * channels, 1, stride=stride) if changes else x
    y = _conv(y, channels, 1)
    y = _conv(_norm_relu(y), channels, 3, stride=stride)
    y = _conv(_norm_relu(y), 4 * channels, 1)
    return keras.Model(x, keras.layers.Add()([y, shortcut]), name=name)


def _shortcut(x: Any, channels: int, *, stride: int) -> Any:
    if stride == 1 and x.shape[-1] == channels:
        return x
    return _norm(_conv(x, channels, 1, stride=stride))


def _conv(x: Any, channels: int, edge: int, *, stride: int = 1) -> Any:
    import keras

    return keras.layers.Conv2D(
        channels,
        edge,
        strides=stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )(x)


def _norm(x: Any) -> Any:
    import keras

    return keras.layers.BatchNormalization(momentum=_MOMENTUM, epsilon=_EPSILON)(x)


def _norm_relu(x: Any) -> Any:
    import keras

    return keras.layers.ReLU()(_norm(x))


def _add_relu(x: Any, shortcut: Any) -> Any:
    import keras

    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))
