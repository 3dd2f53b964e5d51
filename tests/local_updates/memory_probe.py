"""Run as a process of its own: the memory peak of training steps through ``fit``.

Usage: python memory_probe.py METHOD ordered|loose cpu|emu BATCH. Prints the peak in bytes above
what is held at rest: resident size of the process, or bytes of the emulated device's allocator.
16 tanh layers of 512; at batch 16384 one activation is 32 MiB.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

from tflms import emulator
from tflms.local_updates import LocalTrainer, split


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(method, ordered, device, batch, *, width=512, depth=16):
    batch = int(batch)
    if device == "emu":
        emulator.load(memory_bytes=2**31)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(width, activation="tanh") for _ in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *stack, keras.layers.Dense(10)])
    plan = split(model, chunks=1) if method == "backprop" else split(model)
    devices = [emulator.device] * len(plan.chunks) if device == "emu" else None
    trainer = LocalTrainer(
        model, plan, method=method, ordered=ordered == "ordered", devices=devices
    )
    trainer.compile(
        optimizer=keras.optimizers.SGD(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    x = tf.random.normal((batch, width))
    y = np.random.default_rng(0).integers(0, 10, batch)
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(2)
    if device == "emu":
        rest = emulator.stats().bytes_in_use
        emulator.reset_stats()
    else:
        rest = status("VmRSS")
        with open("/proc/self/clear_refs", "w") as marks:
            marks.write("5")  # start the high-water mark anew
    trainer.fit(dataset, epochs=1, verbose=0)
    peak = emulator.stats().peak_bytes if device == "emu" else status("VmHWM")
    print(peak - rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
