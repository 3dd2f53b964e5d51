"""Measures two equal chunks: in one process and, by ``local-run --chunks 2``, in two.

Usage: throughput_script.py RESULT one|two [BATCH [BATCHES [EPOCHS]]]. One intra-op thread each.
Writes the seconds of each epoch
after the first, the bytes that crossed the cut a batch, and the bytes of its activations.
"""

from __future__ import annotations

import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from tflms.local_updates import LocalTrainer, split

WIDTH = 1024


def chunked_net(batch_size):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu", name=f"dense_{i}") for i in range(8)]
    last = keras.layers.Dense(10, name="logits")
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, last])
    return model, split(model, at=["dense_3"], batch_size=batch_size)


def main(result, kind, batch=512, batches=40, epochs=3):
    batch, batches, epochs = int(batch), int(batches), int(epochs)
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
    seconds = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                self.start = time.monotonic()

        def on_epoch_end(self, epoch, logs=None):
            seconds.append(time.monotonic() - self.start)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)
    trainer.fit(dataset, epochs=epochs, verbose=0, callbacks=[Clock()])
    facts = {"seconds": seconds[1:], "cut_bytes": plan.cuts[0].nbytes}
    if kind == "two":
        facts["wire_bytes"] = trainer._runtime.traffic()["to chunk 1"] / (batches * epochs)
    with open(result, "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
