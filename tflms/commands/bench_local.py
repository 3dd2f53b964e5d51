"""``python -m tflms bench local``: traffic, serial cost, throughput and memory of local updates.

Each figure stands beside its goal. What is timed runs in interleaved rounds, each in fresh
processes with one thread inside an operation; the table says how busy the machine was.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms.commands.children import environment
from tflms.errors import ConfigError, TflmsError

PARTS = ("traffic", "cost", "throughput", "memory")
_THROUGHPUT = Path(__file__).with_name("local_throughput.py")
# Of the 8 x 4096 MLP, in the reference's table of serial cost; two decimals.
_SHORTER = {2: 1.94, 4: 3.87, 8: 7.73}
_MOST_TRAFFIC, _LEAST_SPEED, _MOST_MEMORY = 0.51, 1.6, 0.15


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        part: which part of the bench it is from.
        what: what was measured.
        value: the figure, a ratio.
        goal: what it should be, in words.
        met: whether it is.
        detail: what the ratio is made of.
    """

    part: str
    what: str
    value: float
    goal: str
    met: bool
    detail: str


def run(
    *,
    parts: Sequence[str] = PARTS,
    rounds: int = 5,
    batch: int = 512,
    batches: int = 40,
    memory_batch: int = 16384,
    console: Console | None = None,
) -> list[Row]:
    """Measure and print a table.

    Args:
        parts: which of traffic, cost, throughput and memory.
        rounds: interleaved rounds of throughput.
        batch: batch size of throughput and traffic.
        batches: batches an epoch of throughput; two epochs count.
        memory_batch: batch size of the memory measurements.
        console: where the table goes; None: to the screen.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"no part {unknown[0]!r} (known: {', '.join(PARTS)})")
    rows: list[Row] = []
    if "traffic" in parts:
        rows.append(_traffic(batch))
    if "cost" in parts:
        rows += _cost()
    if "throughput" in parts:
        rows.append(_throughput(rounds, batch, batches))
    if "memory" in parts:
        for device in ("cpu", "emu"):
            rows += _memory(device, memory_batch)
    (console or Console()).print(_table(rows))
    return rows


def _traffic(batch: int) -> Row:
    """Bytes over the cut in two processes against pipelined backpropagation over the same cut."""
    import keras
    import numpy as np

    from tflms.commands.local_throughput import WIDTH, chunked_net
    from tflms.local_updates.pipeline import PipelineTrainer

    batches = 4
    local = _train("two", batch, batches, epochs=1)["wire_bytes"]
    model, plan = chunked_net(batch)
    rival = PipelineTrainer(model, plan)
    rival.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.zeros((batch, WIDTH), "float32"), np.zeros(batch, "int32")
    rival.fit([(x, y)] * batches)
    both = rival.cut_bytes[0] / batches
    return Row(
        "traffic", "bytes over a cut, chunked to pipelined backpropagation", local / both,
        f"at most {_MOST_TRAFFIC}", local / both <= _MOST_TRAFFIC,
        f"{local:,.0f} B to {both:,.0f} B a batch",
    )  # fmt: skip


def _cost() -> list[Row]:
    """Serial FLOPs of the paper's MLP by the library's own counters."""
    import keras

    from tflms.local_updates import LocalTrainer, split
    from tflms.local_updates.cost import step_cost

    stack = [keras.layers.Dense(4096, activation="relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((3072,)), *stack, keras.layers.Dense(10)])
    names = [layer.name for layer in model.layers[:7]]
    whole = step_cost(LocalTrainer(model, split(model, chunks=1)))
    rows = []
    for chunks, wanted in _SHORTER.items():
        plan = split(model, at=names[8 // chunks - 1 :: 8 // chunks])
        cost = step_cost(LocalTrainer(model, plan))
        found = whole.serial_flops / cost.serial_flops
        rows.append(
            Row(
                "cost",
                f"serial FLOPs, backpropagation to {chunks} chunks",
                found,
                f"{wanted}",
                round(found, 2) == wanted,
                f"{cost.serial_flops / cost.batch_size / 1e6:.1f} MFLOP an example",
            )
        )
    return rows


def _throughput(rounds: int, batch: int, batches: int) -> Row:
    """Speed of two processes against one, the median of interleaved rounds.

    Beside it, what two runs that share nothing reach at once: what the machine can give just now.
    """
    ratios, apart = [], []
    for _ in range(rounds):
        one = statistics.median(_train("one", batch, batches)["seconds"])
        two = statistics.median(_train("two", batch, batches)["seconds"])
        ratios.append(one / two)
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda kind: _train(kind, batch, batches), ("one", "one")))
        apart.append(2 * one / max(statistics.median(run["seconds"]) for run in both))
    found = statistics.median(ratios)
    return Row(
        "throughput", "two equal chunks, two processes to one", found,
        f"at least {_LEAST_SPEED}", found >= _LEAST_SPEED,
        f"{min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds; two runs that share nothing: "
        f"{statistics.median(apart):.2f}; load {os.getloadavg()[0]:.1f}",
    )  # fmt: skip


def _memory(device: str, batch: int) -> list[Row]:
    """Peak of greedy training against backpropagation, the trainer's and Keras's own."""
    greedy = _peak(device, batch, "greedy,ordered")
    where = "of a fresh process" if device == "cpu" else "on the emulated accelerator"
    rows = []
    for method, name in (("backprop", "method='backprop'"), ("plain", "Keras's own fit")):
        whole = _peak(device, batch, f"{method},ordered")
        rows.append(
            Row(
                "memory",
                f"peak {where}, greedy to {name}",
                greedy / whole,
                f"at most {_MOST_MEMORY}",
                greedy <= _MOST_MEMORY * whole,
                f"{greedy / 1e6:.0f} MB to {whole / 1e6:.0f} MB at batch {batch}",
            )
        )
    return rows


def _train(kind: str, batch: int, batches: int, *, epochs: int = 3) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        start = ["-m", "tflms", "local-run", "--chunks", "2"] if kind == "two" else []
        words = [str(result), kind, str(batch), str(batches), str(epochs)]
        _python(*start, str(_THROUGHPUT), *words)
        facts: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return facts


def _peak(device: str, batch: int, case: str) -> int:
    return int(_python("-m", "tflms.commands.local_memory", device, str(batch), case))


def _python(*words: str) -> str:
    run = subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise TflmsError(f"{' '.join(words)} failed ({run.returncode}):\n{run.stderr[-4000:]}")
    return run.stdout


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="local updates (measured)", title_justify="left")
    for heading in ("part", "what", "figure", "goal", "met", "detail"):
        table.add_column(heading, justify="right" if heading == "figure" else "left")
    for r in rows:
        met = "yes" if r.met else "no"
        table.add_row(r.part, r.what, f"{r.value:.3f}", r.goal, met, r.detail)
    return table
