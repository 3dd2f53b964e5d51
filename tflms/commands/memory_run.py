"""Trains one network under a memory limit, in a process of its own, and tells what came of it.

``python -m tflms.commands.memory_run`` reads a job as JSON from standard input and writes the
result as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tflms.commands.children import ask
from tflms.errors import InfeasibleError

# Small enough that a run takes seconds; the shapes of the networks are the published ones.
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "resnet50": {"image": 64, "batch": 32},
    "densenet121": {"image": 64, "batch": 16},
    "inception_v3": {"image": 80, "batch": 16},
    "mobilenet_v3": {"image": 96, "batch": 16},
    "unet3d": {"size": 64, "optimizer_name": "sgd"},
    "transformer": {"layers": 12, "batch": 8},
    "residual_mlp": {"layers": 200, "batch": 256},
    "recurrent": {"steps": 32, "batch": 64},
}
GRAPHS = ("resnet50", "unet3d")  # built as graphs for a session; the others are Keras models


def run_child(
    network: str, memory_bytes: int, limit_bytes: int, runs: int, steps: int, timeout_seconds: float
) -> dict[str, Any]:
    """Train a network in a device of so many bytes, under a limit.

    Returns:
        ``fits``; ``plain``, ``predicted`` and ``floor`` in bytes; ``real``, the peak of each step;
        ``seconds`` of the fastest step, ``planning`` seconds, ``swaps``; or ``infeasible``, the
        least limit that the planner offers instead.

    Raises:
        TflmsError: the process failed for another reason than memory.
    """
    job = {
        "network": network, "memory": memory_bytes, "limit": limit_bytes, "runs": runs,
        "steps": steps,
    }  # fmt: skip
    return ask(
        "tflms.commands.memory_run", job, subject=f"training {network}", key="fits",
        timeout_seconds=timeout_seconds,
    )  # fmt: skip


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job in this process."""
    import tensorflow as tf

    from tflms import emulator

    tf.config.experimental.enable_op_determinism()
    emulator.load(job["memory"])
    arguments = NETWORKS[job["network"]]
    peaks: list[int] = []
    seconds: list[float] = []
    found: dict[str, Any] = {"fits": True, "real": peaks, "seconds": seconds}
    way = _sessions if job["network"] in GRAPHS else _keras
    try:
        for peak, spent in way(job, dict(arguments), found):
            peaks.append(peak)
            seconds.append(spent)
    except InfeasibleError as error:
        found |= {"fits": False, "infeasible": error.minimum_bytes}
    except tf.errors.ResourceExhaustedError as error:
        found |= {"fits": False, "error": str(error)[:300]}
    return found


def _sessions(
    job: Mapping[str, Any], arguments: dict[str, Any], found: dict[str, Any]
) -> Iterator[tuple[int, float]]:
    import tensorflow as tf

    import tflms
    from tflms import emulator
    from tflms.zoo import graphs

    case = getattr(graphs, job["network"])(**arguments, device=emulator.device)
    report = tflms.rewrite(
        case.graph, {"memory_limit": job["limit"]}, loss=case.loss,
        fetches=[case.loss, case.train_op],
    )  # fmt: skip
    _note(found, report)
    for _ in range(job["runs"]):
        with tf.compat.v1.Session(graph=case.graph) as session:
            session.run(case.init_op)
            for step in range(job["steps"]):
                emulator.reset_stats()
                begun = time.perf_counter()
                session.run([case.loss, case.train_op], case.feed_dict(step))
                yield emulator.stats().peak_bytes, time.perf_counter() - begun


def _keras(
    job: Mapping[str, Any], arguments: dict[str, Any], found: dict[str, Any]
) -> Iterator[tuple[int, float]]:
    import tflms
    from tflms import emulator
    from tflms.zoo import tasks

    task = tasks.task(job["network"], **arguments)
    model = task.compile()
    with tflms.enabled({"memory_limit": job["limit"]}) as traced:
        for step in range(job["runs"] * job["steps"]):
            emulator.reset_stats()
            begun = time.perf_counter()
            model.train_on_batch(task.inputs, task.labels)
            if not step:
                _note(found, traced.report)
            yield emulator.stats().peak_bytes, time.perf_counter() - begun


def _note(found: dict[str, Any], report: Any) -> None:
    found |= {
        "plain": report.plain_peak_bytes,
        "predicted": report.predicted_peak_bytes,
        "floor": report.floor_bytes or 0,
        "swaps": len(report.swaps),
        "planning": report.seconds,
        "operations": report.graph_ops,
    }


def main() -> None:
    """Read a job, do it, tell the result."""
    result = train(json.load(sys.stdin))
    sys.stdout.flush()
    os.write(1, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
