"""Train an MLP on handwritten digits by backpropagation and by local updates, and compare.

Run: python examples/local_mlp.py [STEPS]. The digits come with scikit-learn.
"""

from __future__ import annotations

import sys

import keras
from sklearn.datasets import load_digits

from tflms.local_updates.compare import compare, table


def build():
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(256, activation="relu") for _ in range(6)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])


def main(steps=400):
    digits = load_digits()
    data = (digits.data.astype("float32") / 16, digits.target.astype("int32"))
    rows = compare(
        build,
        data,
        steps=steps,
        batch_size=64,
        optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    print(table(rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
