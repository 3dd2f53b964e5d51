"""``python -m tflms bench memory``: peaks under a memory_limit, predicted and real."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms.commands.memory_run import NETWORKS, run_child
from tflms.errors import ConfigError
from tflms.units import format_bytes

_LARGE = 16 * 10**9  # address space only: pages become real when they are written
_NO_LIMIT = 1 << 50
_MOST_OVER, _MOST_UNDER = 0.05, 0.01  # of the real peak: how far a prediction may be off


@dataclass(frozen=True, slots=True)
class Row:
    """One network under one limit.

    Attributes:
        network: its name.
        fraction: the limit as a share of the predicted plain peak.
        limit_bytes: the same in bytes; the device has 3 % more.
        floor_bytes: what no plan can go below (predicted).
        predicted_bytes: peak of the plan (predicted); 0 where the limit was refused.
        real_bytes: largest peak of all steps; 0 where none ended.
        fits: whether all steps of all runs ended; None where the limit was refused.
        refused_bytes: the least limit that the planner offers instead, where it refused.
        step_seconds: the fastest step.
        planning_seconds: what the rewrite took.
        swaps: values that are parked.
    """

    network: str
    fraction: float
    limit_bytes: int
    floor_bytes: int = 0
    predicted_bytes: int = 0
    real_bytes: int = 0
    fits: bool | None = None
    refused_bytes: int = 0
    step_seconds: float = 0.0
    planning_seconds: float = 0.0
    swaps: int = 0

    @property
    def error(self) -> float:
        """How far the prediction is above the real peak, as a share of it."""
        return self.predicted_bytes / self.real_bytes - 1 if self.real_bytes else 0.0

    @property
    def met(self) -> bool | None:
        """Whether it fits and the prediction is near enough; None where no plan was made."""
        if self.fits is None or self.fraction == 1.0:
            return None
        return self.fits and -_MOST_UNDER <= self.error <= _MOST_OVER


def run(
    *,
    networks: Sequence[str] = tuple(NETWORKS),
    fractions: Sequence[float] = (0.9, 0.75, 0.6),
    runs: int = 5,
    steps: int = 2,
    timeout: float = 900.0,
    console: Console | None = None,
) -> list[Row]:
    """Train each network under each limit in a device of the limit and 3 %, and print a table.

    Every row is a process of its own. Graphs are run in ``runs`` sessions one after the other;
    Keras models take ``runs`` times ``steps`` steps.

    Args:
        networks: names; all by default.
        fractions: limits as shares of the predicted plain peak.
        runs: how often each is trained.
        steps: steps of each run.
        timeout: seconds that a process has.
        console: where to print; by default standard output.

    Raises:
        ConfigError: a network is unknown.
    """
    console = console or Console()
    if unknown := [name for name in networks if name not in NETWORKS]:
        raise ConfigError(f"no network {unknown[0]!r}; write one of {', '.join(NETWORKS)}")
    rows: list[Row] = []
    for name in networks:
        plain = run_child(name, _LARGE, _NO_LIMIT, 1, steps, timeout)
        rows.append(_row(name, 1.0, plain["plain"], plain))
        _say(console, rows[-1])
        for fraction in fractions:
            limit = int(fraction * plain["plain"])
            found = run_child(name, limit * 103 // 100, limit, runs, steps, timeout)
            rows.append(_row(name, fraction, limit, found))
            _say(console, rows[-1])
    _print(rows, console)
    return rows


def _row(name: str, fraction: float, limit: int, found: dict[str, Any]) -> Row:
    if "infeasible" in found:
        return Row(name, fraction, limit, refused_bytes=found["infeasible"])
    return Row(
        network=name,
        fraction=fraction,
        limit_bytes=limit,
        floor_bytes=found.get("floor", 0),
        predicted_bytes=found.get("predicted", 0),
        real_bytes=max(found["real"], default=0),
        fits=found["fits"],
        step_seconds=min(found["seconds"], default=0.0),
        planning_seconds=found.get("planning", 0.0),
        swaps=found.get("swaps", 0),
    )


def _say(console: Console, row: Row) -> None:
    if row.fits is None:
        told = f"refused; {format_bytes(row.refused_bytes)} would do"
    else:
        told = "fits" if row.fits else "DOES NOT FIT"
    console.print(f"{row.network}, {row.fraction:.0%}: {told}", style="dim", highlight=False)


def _print(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="peak under a memory limit", title_justify="left")
    headings = ("network", "limit", "", "predicted", "real", "off by", "fits", "swaps", "a step",
                "planning", "met")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "network" else "right")
    for row in rows:
        refused = row.fits is None
        table.add_row(
            row.network,
            format_bytes(row.limit_bytes),
            "plain" if row.fraction == 1.0 else f"{row.fraction:.0%}",
            "refused" if refused else format_bytes(row.predicted_bytes),
            "" if refused else format_bytes(row.real_bytes),
            "" if refused else f"{row.error:+.1%}",
            "" if refused else "yes" if row.fits else "NO",
            str(row.swaps),
            f"{row.step_seconds:.2f} s",
            f"{row.planning_seconds:.1f} s",
            "" if row.met is None else "yes" if row.met else "NO",
        )
    console.print(table)


def run_steps(case: Any, steps: int = 3) -> tuple[int, float]:
    """Train for some steps; return the real peak over what was in use before, and seconds.

    Raises:
        tensorflow.errors.ResourceExhaustedError: the step does not fit in the device.
    """
    import tensorflow as tf

    from tflms import emulator

    before = emulator.stats().bytes_in_use
    peak, seconds = 0, float("inf")
    with tf.compat.v1.Session(graph=case.graph) as session:
        session.run(case.init_op)
        for step in range(steps):
            emulator.reset_stats()
            begun = time.perf_counter()
            session.run([case.loss, case.train_op], case.feed_dict(step))
            seconds = min(seconds, time.perf_counter() - begun)
            peak = max(peak, emulator.stats().peak_bytes - before)
    return peak, seconds
