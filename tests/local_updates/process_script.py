"""A training script as users write it, run once per chunk by ``local-run``; faults on demand.

Usage: process_script.py RESULT METHOD QUEUE_SIZE FAULT, or process_script.py several RESULT
METHOD,QUEUE_SIZE/METHOD,QUEUE_SIZE. Chunk 0 writes RESULT as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from tests.local_updates.local_nets import compiled, data, digest, mlp
from tflms.local_updates import LocalTrainer, split
from tflms.local_updates.worker import Worker

X, Y = data()
CHUNKS = 3


def trainer_for(runtime, method, queue_size):
    model = mlp()
    plan = split(model, chunks=CHUNKS)
    options = {"runtime": runtime, "queue_size": queue_size, "timeout": 8}
    return compiled(LocalTrainer(model, plan, method=method, **options))


def inject(fault):
    """Make chunk 1's third batch go wrong."""
    plain = Worker._train_on

    def faulty(self, message):
        if self.stage.index == 1 and self.batches == 2:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "exception":
                raise ValueError("injected")
            if fault == "hang":
                time.sleep(60)
        if fault == "slow" and self.stage.index == 2:
            time.sleep(0.2)
        plain(self, message)

    Worker._train_on = faulty


def on_other_ports(number):
    """Move this run's addresses on, so that one launch can run several trainers in a row."""
    facts = json.loads(os.environ["TFLMS_CLUSTER"])
    addresses = []
    for address in facts["cluster"]["chunk"]:
        host, _, port = address.rpartition(":")
        addresses.append(f"{host}:{int(port) + (7 if number else 0)}")
    facts["cluster"]["chunk"] = addresses
    os.environ["TFLMS_CLUSTER"] = json.dumps(facts)


def several(result, cases):
    """Train once per case ``method,queue_size``; chunk 0 writes each one's outcome."""
    found = []
    for number, case in enumerate(cases.split("/")):
        on_other_ports(number)
        if number == 0:
            plain = Worker._train_on
            inject("slow")
        else:
            Worker._train_on = plain
        method, queue_size = case.split(",")
        trainer = trainer_for("processes", method, int(queue_size))
        keras.utils.set_random_seed(2)
        try:
            history = fit(trainer, np.ones(len(X), "float32"))
        except SystemExit:
            continue  # another chunk than 0: served
        found.append([digest(trainer), history.history, trainer._runtime.traffic()])
    if found:
        with open(result, "w") as file:
            json.dump(found, file)


def fit(trainer, weights):
    return trainer.fit(
        X, Y, sample_weight=weights, epochs=2, batch_size=32, verbose=0, validation_data=(X, Y)
    )


def main(result, method, queue_size, fault):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    inject(fault)
    index = json.loads(os.environ["TFLMS_CLUSTER"])["task"]["index"]
    trainer = trainer_for("processes", method, int(queue_size))
    weights = np.ones(len(X), "float32")
    if fault == "nan":
        weights[70] = np.nan
    if fault == "other model" and index == 1:
        trainer = compiled(narrow())
    keras.utils.set_random_seed(2)
    try:
        history = fit(trainer, weights)
    except Exception as error:
        print(f"ERROR IN CHUNK {index}: {type(error).__name__}: {error}", flush=True)
        raise
    facts = {
        "digest": digest(trainer),
        "history": history.history,
        "traffic": trainer._runtime.traffic(),
    }
    with open(result, "w") as file:
        json.dump(facts, file)


def narrow():
    model = mlp(width=8)
    return LocalTrainer(model, split(model, chunks=CHUNKS), runtime="processes", timeout=8)


if __name__ == "__main__":
    if sys.argv[1] == "several":
        several(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
