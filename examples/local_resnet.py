"""Train a small residual network on handwritten digits by local updates, and compare.

Run: python examples/local_resnet.py [STEPS]. Cuts fall between residual blocks, where one tensor
crosses; the heads are a strided convolution.
"""

from __future__ import annotations

import sys

import keras
from sklearn.datasets import load_digits

from tflms.local_updates.compare import compare, table

layers = keras.layers


def block(tensor, filters, strides):
    inner = layers.Conv2D(filters, 3, strides=strides, padding="same", use_bias=False)(tensor)
    inner = layers.ReLU()(layers.BatchNormalization()(inner))
    inner = layers.Conv2D(filters, 3, padding="same", use_bias=False)(inner)
    inner = layers.BatchNormalization()(inner)
    if strides != 1 or tensor.shape[-1] != filters:
        tensor = layers.Conv2D(filters, 1, strides=strides, use_bias=False)(tensor)
    return layers.ReLU()(layers.Add()([tensor, inner]))


def build():
    keras.utils.set_random_seed(0)
    entry = keras.Input((8, 8, 1))
    tensor = layers.ReLU()(layers.Conv2D(16, 3, padding="same")(entry))
    for filters, strides in ((16, 1), (16, 1), (32, 2), (32, 1), (32, 1)):
        tensor = block(tensor, filters, strides)
    return keras.Model(entry, layers.Dense(10)(layers.GlobalAveragePooling2D()(tensor)))


def head(shape):
    """A strided convolution where there are positions left, else a linear layer."""
    if len(shape) == 2:
        return layers.Dense(10)
    return keras.Sequential(
        [
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def main(steps=150):
    digits = load_digits()
    data = (digits.images[..., None].astype("float32") / 16, digits.target.astype("int32"))
    rows = compare(
        build,
        data,
        steps=steps,
        batch_size=64,
        optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        heads=head,
    )
    print(table(rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
