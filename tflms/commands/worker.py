"""The child process of a command: trains one graph on the emulated accelerator and tells how.

The emulated device's memory is given once per process, so every configuration has its own. The job
comes in on standard input and events go out on standard output, one JSON object a line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tflms import emulator
from tflms.commands.job import Alive, Job, Outcome, Training
from tflms.runtime import survival
from tflms.runtime.rewrite import rewrite
from tflms.zoo import data, graphs

v1 = tf.compat.v1


def main() -> None:
    """Read a job, do it, and write its outcome as the last line."""
    job = Job(**json.load(sys.stdin))
    emulator.load(job.memory_bytes)
    tf.config.experimental.enable_op_determinism()
    tf.random.set_seed(0)
    v1.disable_eager_execution()
    tell("outcome", **dataclasses.asdict(train(job)))


def tell(event: str, **facts: Any) -> None:
    """Write an event for the parent."""
    sys.stdout.flush()
    os.write(1, (json.dumps({"event": event, **facts}) + "\n").encode())


def train(job: Job) -> Outcome:
    """Build the job's graph, rewrite it where asked, and train it."""
    network = getattr(graphs, job.model)(**arguments_of(job), device=emulator.device)
    report = None
    if job.config is not None:
        report = rewrite(
            network.graph,
            job.config,
            loss=network.loss,
            fetches=[network.loss, network.train_op],
        )
    names = report.inserted_names if report is not None and job.verify else ()
    before_run = in_run = None
    if report is not None and names:
        verified = report.verify()
        before_run = Alive(verified.expected, verified.survived)
    tell("built")
    trainings: list[Training] = []
    out_of_memory = None
    try:
        for number in range(job.sessions):
            metadata = v1.RunMetadata() if names and number == 0 else None
            trainings.append(train_once(network, job.steps, metadata))
            if metadata is not None:
                found = survival.check_run(names, metadata)
                in_run = Alive(found.expected, found.survived)
    except tf.errors.ResourceExhaustedError as error:
        out_of_memory = telling_line(error.message)
    return Outcome(
        trainings=trainings,
        out_of_memory=out_of_memory,
        before_run=before_run,
        in_run=in_run,
        report=None if report is None else report.to_dict(),
    )


def arguments_of(job: Job) -> dict[str, Any]:
    """Return what the builder is called with, the job's images among it."""
    if job.brain_size is None:
        return job.arguments
    size, batch = job.arguments["size"], job.arguments.get("batch", 1)
    volume = data.brain(job.brain_size)

    def of_step(which: int) -> Any:
        return lambda step: data.crops(*volume, size=size, batch=batch, seed=step)[which]

    return {**job.arguments, "images": of_step(0), "labels": of_step(1)}


def train_once(network: graphs.TrainingGraph, steps: int, metadata: Any) -> Training:
    """Train from the start in a session of its own; ``metadata`` keeps the first run's graphs."""
    fetches = [network.loss, network.train_op]
    losses, seconds, counted = [], [], []
    variables = network.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)
    with v1.Session(graph=network.graph) as session:
        session.run(network.init_op)
        for step in range(steps):
            feeds = network.feed_dict(step)
            options = None
            if metadata is not None and step == 0:
                options = v1.RunOptions(output_partition_graphs=True)
            emulator.reset_stats()
            start = time.perf_counter()
            loss = session.run(
                fetches, feeds, options=options, run_metadata=metadata if options else None
            )[0]
            seconds.append(time.perf_counter() - start)
            counted.append(emulator.stats())
            losses.append(float(loss))
            tell("step", loss=losses[-1])
        values = session.run(variables)
    return Training(
        losses=losses,
        peak_bytes=[s.peak_bytes for s in counted],
        to_host_bytes=[s.to_host_bytes for s in counted],
        to_device_bytes=[s.to_device_bytes for s in counted],
        seconds=seconds,
        variables={v.name: digest(value) for v, value in zip(variables, values, strict=True)},
    )


def digest(value: Any) -> str:
    """Return a value's SHA-256, of its bytes."""
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def telling_line(message: str) -> str:
    """Return the line of an error that says what did not fit, without the traceback around it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = ("OOM when allocating", "RESOURCE_EXHAUSTED")
    return next((line for mark in telling for line in lines if mark in line), lines[0])


if __name__ == "__main__":
    main()
