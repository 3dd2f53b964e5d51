"""Run as a process of its own: the memory peak of one training step through ``fit``.

Usage: python memory_probe.py METHOD ORDERED; prints the peak above the resident size at rest, in
bytes. 16 tanh layers of 512, batch 16384: one activation is 32 MiB.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

from tflms.local_updates import LocalTrainer, split


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(method, ordered, *, width=512, batch=16384, depth=16):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(width, activation="tanh") for _ in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *stack, keras.layers.Dense(10)])
    plan = split(model, chunks=1) if method == "backprop" else split(model)
    trainer = LocalTrainer(model, plan, method=method, ordered=ordered)
    trainer.compile(
        optimizer=keras.optimizers.SGD(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    x = tf.random.normal((batch, width))
    y = np.random.default_rng(0).integers(0, 10, batch)
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(2)
    rest = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")  # start the high-water mark anew
    trainer.fit(dataset, epochs=1, verbose=0)
    print(status("VmHWM") - rest)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "ordered")
