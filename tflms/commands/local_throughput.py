"""Trains two equal chunks and writes their times: in one process or, by ``local-run``, in two.

Usage: local_throughput.py RESULT one|two [BATCH [BATCHES [EPOCHS]]]; two: by ``python -m tflms
local-run --chunks 2``. One thread inside an operation each. RESULT becomes JSON: the seconds of
each epoch after the first, the bytes a batch that crossed the cut, and those of its activations.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tflms.local_updates import LocalTrainer, split

WIDTH = 1024


def chunked_net(batch: int) -> tuple[Any, Any]:
    """Return an MLP of eight layers and its plan of two equal chunks."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, activation="relu", name=f"dense_{i}") for i in range(8)]
    last = keras.layers.Dense(10, name="logits")
    model = keras.Sequential([keras.Input((WIDTH,)), *hidden, last])
    return model, split(model, at=["dense_3"], batch_size=batch)


class _Clock(keras.callbacks.Callback):
    """Takes the seconds of each epoch, from its first batch until all chunks are done."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch == 0:
            self._start = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.seconds.append(time.monotonic() - self._start)


def main(result: str, kind: str, batch: int = 512, batches: int = 40, epochs: int = 3) -> None:
    """Train and write the result."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1 if kind == "one" else 2)
    model, plan = chunked_net(batch)
    runtime = "fused" if kind == "one" else "processes"
    trainer = LocalTrainer(model, plan, runtime=runtime, timeout=60)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
    random = np.random.default_rng(0)
    x = random.normal(size=(batch * batches, WIDTH)).astype("float32")
    y = random.integers(0, 10, batch * batches).astype("int32")
    clock = _Clock()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)
    trainer.fit(dataset, epochs=epochs, verbose=0, callbacks=[clock])
    facts: dict[str, Any] = {"seconds": clock.seconds[1:], "cut_bytes": plan.cuts[0].nbytes}
    if kind == "two":
        sent = trainer._runtime.traffic()["to chunk 1"]
        facts["wire_bytes"] = sent / (batches * epochs)
    with open(result, "w", encoding="utf-8") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
