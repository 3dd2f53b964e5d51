"""Trains by local updates and prints the peaks of memory above what is held at rest, in bytes.

Usage: local_memory.py cpu|emu BATCH CASE..., a case being METHOD,ordered|loose|swapped: chunks in
order, without an order, or rewritten for swapping; METHOD plain is Keras's own fit. cpu: resident
size of this process, which must be a fresh one, so one case alone. emu: bytes of the emulated
accelerator's allocator. 16 tanh layers of 512; at batch 16384 one activation is 32 MiB.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tflms
from tflms import emulator
from tflms.local_updates import LocalTrainer, split

WIDTH, DEPTH = 512, 16
SHARE = 0.6  # of the plain peak, for what is swapped
CHUNKS = {"backprop": 1, "greedy": None, "chunked": 2}


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(device: str, batch: int, method: str, how: str) -> int:
    """Train two batches and return the peak."""
    keras.utils.set_random_seed(0)
    place: Any = tf.device(emulator.device) if device == "emu" else nullcontext()
    with place:
        stack = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(DEPTH)]
        model = keras.Sequential([keras.Input((WIDTH,)), *stack, keras.layers.Dense(10)])
    if method != "plain":
        place = nullcontext()
        plan = split(model, chunks=CHUNKS[method], batch_size=batch)
        devices = [emulator.device] * len(plan.chunks) if device == "emu" else None
        model = LocalTrainer(model, plan, method=method, ordered=how != "loose", devices=devices)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss, jit_compile=False)
    x = tf.random.normal((batch, WIDTH))
    y = np.random.default_rng(0).integers(0, 10, batch)
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(2)
    swapped: Any = nullcontext()
    if how == "swapped":
        swapped = tflms.enabled({"memory_limit": SHARE})
    if device == "emu":
        rest = emulator.stats().bytes_in_use
        emulator.reset_stats()
    else:
        rest = _status("VmRSS")
        with open("/proc/self/clear_refs", "w", encoding="ascii") as marks:
            marks.write("5")  # start the high-water mark anew
    with swapped, place:
        model.fit(dataset, epochs=1, verbose=0)
    return (emulator.stats().peak_bytes if device == "emu" else _status("VmHWM")) - rest


def main(device: str, batch: str, *cases: str) -> None:
    """Print the peak of each case."""
    if device == "emu":
        emulator.load(memory_bytes=2**31)
    elif len(cases) > 1:
        sys.exit("cpu: one case, since a process does not give back all that it once held")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    for case in cases:
        method, how = case.split(",")
        sys.stdout.write(f"{peak(device, int(batch), method, how)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
