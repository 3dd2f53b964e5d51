"""A training script, run once per chunk by ``local-run``: many runs in a row, faults on demand.

Usage: process_script.py RESULT CASE... with CASE ``method,queue_size,what``. Every process appends
one line of JSON per case to RESULT.INDEX: how it ended, or the error and the seconds until then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tests.local_updates.local_nets import compiled, data, digest, mlp
from tflms.local_updates import ChunkError, LocalCheckpoint, LocalTrainer, split
from tflms.local_updates.worker import Worker

X, Y = data()
CHUNKS = 3
SHORT, LONG = 5, 40  # seconds: timeouts of the runs that must time out, and of the others
FROZEN_SECONDS = 8


def trainer_for(runtime, method, queue_size, *, width=32, timeout=LONG):
    model = mlp(depth=2, width=width)
    plan = split(model, chunks=CHUNKS)
    options = {"runtime": runtime, "queue_size": queue_size, "timeout": timeout}
    return compiled(LocalTrainer(model, plan, method=method, **options))


def fit(trainer, weights=None, **options):
    keras.utils.set_random_seed(2)
    weights = np.ones(len(X), "float32") if weights is None else weights
    options = {"verbose": 0, "validation_data": (X, Y), **options}
    return trainer.fit(X, Y, sample_weight=weights, epochs=2, batch_size=32, **options)


def inject(what):
    """Make chunk 1's third batch go wrong, or chunk 2 slow."""

    def faulty(self, message):
        if what == "slow" and self.stage.index == 2:
            time.sleep(0.2)
        if self.stage.index == 1 and self.batches == 2:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "frozen":
                subprocess.Popen(["sh", "-c", f"sleep {FROZEN_SECONDS}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "exception":
                raise ValueError("injected")
            if what == "hang":
                time.sleep(FROZEN_SECONDS)
        PLAIN(self, message)

    Worker._train_on = faulty


PLAIN = Worker._train_on


def on_hosts_of(case):
    """Give each chunk a loopback host of its own, so that one launch can run many clusters."""
    facts = json.loads(os.environ["TFLMS_CLUSTER"])
    ports = [address.rpartition(":")[2] for address in facts["cluster"]["chunk"]]
    hosts = [f"127.0.{case + 1}.{chunk + 1}" for chunk in range(CHUNKS)]
    addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    facts["cluster"]["chunk"] = addresses
    os.environ["TFLMS_CLUSTER"] = json.dumps(facts)
    return facts["task"]["index"]


def meet(result, case, index):
    """Wait until every process is at this case."""
    Path(f"{result}.at.{case}.{index}").touch()
    limit = time.monotonic() + 60
    while not all(Path(f"{result}.at.{case}.{other}").exists() for other in range(CHUNKS)):
        if time.monotonic() > limit:
            raise TimeoutError(f"case {case} has not begun everywhere")
        time.sleep(0.02)


def run(case, result, method, queue_size, what):
    index = on_hosts_of(case)
    meet(result, case, index)
    inject(what)
    if what == "late":
        time.sleep(1.5 * index)
    options = {}
    if what in ("saved", "resumed"):
        saver = LocalCheckpoint(f"{result}.saved", every_batches=4)  # the second epoch's first
        options = {"shuffle": False, "callbacks": [saver] if what == "saved" else []}
        options |= {"resume": f"{result}.saved/batch_4"} if what == "resumed" else {}
    weights = np.ones(len(X), "float32")
    if what == "nan":
        weights[70] = np.nan
    other = what == "other model" and index == 1
    trainer = trainer_for(
        "processes",
        method,
        int(queue_size),
        width=8 if other else 32,
        timeout=SHORT if what in ("hang", "frozen") else LONG,
    )
    started = time.monotonic()
    try:
        history = fit(trainer, weights, **options)
    except SystemExit:
        return {"served": True, "kind": "end"}
    except ChunkError as error:
        facts = {"chunk": error.chunk, "batch": error.batch, "kind": "error"}
        return {**facts, "error": str(error), "seconds": time.monotonic() - started}
    traffic = trainer._runtime.traffic()
    facts = {"digest": digest(trainer), "history": history.history, "traffic": traffic}
    try:
        trainer.fit(X, Y, verbose=0)
    except Exception as error:
        facts["again"] = f"{type(error).__name__}: {error}"
    return {**facts, "kind": "end"}


def main(result, *cases):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    index = json.loads(os.environ["TFLMS_CLUSTER"])["task"]["index"]
    for number, case in enumerate(cases):
        outcome = run(number, result, *case.split(","))
        with open(f"{result}.{index}", "a") as file:
            file.write(json.dumps({"case": case, **outcome}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
