"""Train a small Transformer language model on Python's own documentation strings, and compare.

Run: python examples/local_transformer.py [STEPS]. Characters are the vocabulary; each block's head
is layer norm and a linear layer to it. With a vocabulary of words such heads cost as much as the
blocks: see ``heads="lm_lowrank"``.
"""

from __future__ import annotations

import argparse
import asyncio
import decimal
import logging
import subprocess
import sys
import tarfile
import typing

import keras
import numpy as np

from tflms.local_updates.compare import compare, table

layers = keras.layers
LENGTH, WIDTH, VOCABULARY = 48, 64, 96
MODULES = (argparse, asyncio.events, decimal, logging, subprocess, tarfile, typing)


class Positions(layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, shape):
        """Make the table."""
        self.table = self.add_weight(shape=(shape[1], shape[2]), initializer="normal")

    def call(self, x):
        """Return x with the positions added."""
        return x + self.table


def build():
    keras.utils.set_random_seed(0)
    entry = keras.Input((LENGTH,), dtype="int32")
    tensor = Positions()(layers.Embedding(VOCABULARY, WIDTH)(entry))
    for _ in range(4):
        seen = layers.LayerNormalization()(tensor)
        attended = layers.MultiHeadAttention(4, WIDTH // 4)(seen, seen, use_causal_mask=True)
        tensor = layers.Add()([tensor, attended])
        inner = layers.Dense(2 * WIDTH, activation="gelu")(layers.LayerNormalization()(tensor))
        tensor = layers.Add()([tensor, layers.Dense(WIDTH)(inner)])
    return keras.Model(entry, layers.Dense(VOCABULARY)(layers.LayerNormalization()(tensor)))


def text():
    """Source text that every Python brings along, as codes of printable characters."""
    parts = []
    for module in MODULES:
        with open(module.__file__, encoding="utf-8") as file:
            parts.append(file.read())
    codes = np.frombuffer("".join(parts).encode("ascii", "replace"), np.uint8).astype("int32")
    return np.clip(codes - 32, -1, 94) + 1


def main(steps=200):
    codes = text()
    windows = np.lib.stride_tricks.sliding_window_view(codes, LENGTH + 1)[:: LENGTH // 2]
    data = (np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]))
    rows = compare(
        build,
        data,
        steps=steps,
        batch_size=16,
        optimizer=lambda: keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        heads="lm_linear",
    )
    print(table(rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
