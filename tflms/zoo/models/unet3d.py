"""The 3D U-Net (Çiçek et al. 2016) as a Keras model, layer for layer the zoo's training graph."""

from __future__ import annotations

from typing import Any

from tflms.errors import ConfigError


def unet3d(
    size: int = 64,
    filters: int = 8,
    *,
    levels: int = 4,
    classes: int = 3,
    normalize: bool = False,
    seed: int = 0,
) -> Any:
    """Return a 3D U-Net that labels each voxel of a one-channel volume.

    The structure is that of :func:`tflms.zoo.graphs.unet3d`.

    Args:
        size: edge of the cubic volume in voxels, a multiple of ``2 ** (levels - 1)``.
        filters: channels of the first convolution.
        levels: number of resolutions.
        classes: number of labels.
        normalize: adds batch normalization before each ReLU.
        seed: of the weights.

    Raises:
        ConfigError: the size cannot be halved ``levels - 1`` times.
    """
    import keras

    if levels < 1 or size % 2 ** (levels - 1):
        raise ConfigError(
            f"a 3D U-Net of {levels} levels halves its volume {levels - 1} times, which a size of "
            f"{size} does not allow; use a multiple of {2 ** max(levels - 1, 0)}"
        )
    keras.utils.set_random_seed(seed)
    layer = keras.layers

    def conv(x: Any, channels: int) -> Any:
        x = layer.Conv3D(channels, 3, padding="same", kernel_initializer="he_normal")(x)
        if normalize:
            x = layer.BatchNormalization()(x)
        return layer.ReLU()(x)

    skips = []
    x = inputs = keras.Input([size, size, size, 1])
    for level in range(levels):
        x = conv(conv(x, filters << level), filters << level + 1)
        if level < levels - 1:
            skips.append(x)
            x = layer.MaxPooling3D(2)(x)
    for level in reversed(range(levels - 1)):
        channels = filters << level + 1
        x = layer.Conv3DTranspose(channels, 2, strides=2, kernel_initializer="he_normal")(x)
        x = layer.Concatenate()([skips[level], x])
        x = conv(conv(x, channels), channels)
    return keras.Model(inputs, layer.Conv3D(classes, 1)(x), name="unet3d")
