"""Trains one network several ways in turn over an emulated link, in a process of its own.

``python -m tflms.commands.throughput_run`` reads a job as JSON from standard input and writes the
result as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tflms.commands.children import ask

_UNLIMITED = 32 * 10**9  # address space only: pages become real when they are written
_LEAD, _VALUES = 5, 100  # what the TFLMS paper recommends for ResNet-50


def run_child(job: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """Do a job in a process of its own.

    Args:
        job: ``image``, ``plain_batch``, ``times``, ``preset``, ``rounds``.
        timeout_seconds: the process is ended after this long.

    Returns:
        ``memory_bytes``, ``batch``, ``link`` (bytes a second each way) and ``ways``: per way to
        train its ``settings``, and ``seconds`` of a step and ``peak_bytes``, or ``refused``.

    Raises:
        TflmsError: the process failed.
    """
    return ask(
        "tflms.commands.throughput_run", job, subject="the training", key="memory_bytes",
        timeout_seconds=timeout_seconds,
    )  # fmt: skip


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job in this process."""
    import tensorflow as tf

    from tflms import emulator
    from tflms.commands.checkpointing_run import interleaved
    from tflms.runtime.measure import measure_costs
    from tflms.zoo import graphs

    tf.config.experimental.enable_op_determinism()
    emulator.load(_UNLIMITED)

    def build(batch: int) -> Any:
        return graphs.resnet50(image=job["image"], batch=batch, device=emulator.device)

    memory = interleaved({"plain": build(job["plain_batch"])}, 2)["plain"].peak_bytes
    batch = round(job["times"] * job["plain_batch"])
    case = build(batch)
    alone = interleaved({"plain": case}, max(5, job["rounds"]))["plain"].seconds
    link = emulator.Link.preset(
        job["preset"], activation_bytes=_activation_bytes(case), step_seconds=alone
    )
    emulator.set_link(link)
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        measure_costs(
            case.graph, fetches=[case.loss, case.train_op], feeds=case.feed_dict(0),
            init=case.init_op,
        ).save(costs)  # fmt: skip
        cases, ways = _rewritten(lambda: build(batch), memory, str(costs))
    found = interleaved({"plain": case, **cases}, job["rounds"])
    for name, measured in found.items():
        ways.setdefault(name, {"settings": "unlimited memory"})
        ways[name] |= {"seconds": measured.seconds, "peak_bytes": measured.peak_bytes}
    return {"memory_bytes": memory, "batch": batch, "link": link.to_host, "ways": ways}


def _rewritten(
    build: Any, memory: int, costs: str
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Build and rewrite a graph for each way; return them, and what was set or why it was not."""
    import tflms

    cases: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {}
    paper = {"lb": _LEAD, "n_tensors": _VALUES, "cost": costs}
    wanted: dict[str, Any] = {
        "auto": {"memory_limit": memory, "cost": costs},
        "chain_rule, paper": {"strategy": "chain_rule", **paper},
        "direct_order, paper": {"strategy": "direct_order", **paper},
        "chain_rule, tuned": "chain_rule",
        "direct_order, tuned": "direct_order",
    }
    for name, config in wanted.items():
        case = build()
        arguments = {"loss": case.loss, "fetches": [case.loss, case.train_op]}
        try:
            if isinstance(config, str):
                config = tflms.tune(
                    case.graph, {"cost": costs}, strategy=config, memory_limit=memory, **arguments
                ).to_dict()
            report = tflms.rewrite(case.graph, config, **arguments)
        except tflms.InfeasibleError as error:
            ways[name] = {"settings": "", "refused": str(error)}
            continue
        cases[name] = case
        ways[name] = {
            "settings": "" if name == "auto" else _told(report.config),
            "predicted_seconds": report.predicted_seconds,
            "predicted_bytes": report.predicted_peak_bytes,
        }
    return cases, ways


def _told(config: Mapping[str, Any]) -> str:
    """Say in a few words which of the paper's dials were set."""
    told = f"lb {config['lb']}, n {config['n_tensors']}"
    told += ", fused" if config["fuse_swapins"] else ""
    return told + (f", branches {config['branch_threshold']}" if config["swap_branches"] else "")


def _activation_bytes(case: Any) -> int:
    """Bytes of the activations that the backward phase reads."""
    from tflms.config import Config
    from tflms.runtime.job import start

    job = start(
        case.graph, Config(strategy="none"), loss=case.loss, fetches=[case.loss, case.train_op]
    )
    graph, phases, weights = job.graph, job.phases, job.weights()
    return sum(
        weights.nbytes[value]
        for op in graph.ops()
        if phases.forward[op.id]
        for value in op.outputs
        if phases.activation[value]
        and any(phases.step[use.op] and not phases.forward[use.op] for use in graph.uses(value))
    )


def main() -> None:
    """Read a job, do it, tell the result."""
    result = train(json.load(sys.stdin))
    sys.stdout.flush()
    os.write(1, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main()
