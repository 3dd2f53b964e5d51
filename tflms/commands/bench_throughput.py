"""``python -m tflms bench throughput``: images a second under a memory limit, over a real link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tflms.commands.throughput_run import run_child
from tflms.errors import ConfigError
from tflms.units import format_bytes, format_seconds

_GOAL = 0.85  # of the unlimited device's throughput, for auto
_FRAGMENTATION_PERCENT = 3  # more than the limit that a device may need


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train.

    Attributes:
        way: plain in an unlimited memory, ``auto``, or a strategy with the paper's or tuned dials.
        settings: the dials.
        batch: images of a step.
        memory_bytes: what the plain step needs at the plain batch: the limit.
        peak_bytes: real peak; 0 where the way was refused.
        step_seconds: median of interleaved rounds.
        predicted_seconds: by simulation, from measured costs; 0 for the plain step.
        share: throughput, as a share of the plain step's in an unlimited memory.
        fits: whether the peak is within the limit and 3 %; None for the plain step.
        goal: what ``share`` is meant to be at least; None for no goal.
    """

    way: str
    settings: str
    batch: int
    memory_bytes: int
    peak_bytes: int
    step_seconds: float
    predicted_seconds: float
    share: float
    fits: bool | None
    goal: float | None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met in the memory; None without a goal."""
        return None if self.goal is None else bool(self.fits) and self.share >= self.goal


def run(
    *,
    image: int = 112,
    plain_batch: int = 8,
    times: float = 4.7,
    preset: str = "p100-nvlink",
    rounds: int = 5,
    timeout: float = 900.0,
    console: Console | None = None,
) -> list[Row]:
    """Train ResNet-50 at a multiple of the plain batch in the plain step's memory; print a table.

    Costs are measured once over the link. All ways then run one step each in every round, another
    one first each time, in one process; each must keep its peak within the memory and 3 %.

    Args:
        image: edge of the images.
        plain_batch: the batch whose plain peak is the memory.
        times: the batch is so many times the plain one.
        preset: of the link.
        rounds: how many.
        timeout: seconds that the process has.
        console: where to print; by default standard output.

    Raises:
        ConfigError: a number is not positive.
    """
    if min(image, plain_batch, times, rounds) <= 0:
        raise ConfigError("image, plain_batch, times and rounds are positive numbers")
    job = {"image": image, "plain_batch": plain_batch, "times": times, "preset": preset,
           "rounds": rounds}  # fmt: skip
    found = run_child(job, timeout)
    memory, plain = found["memory_bytes"], found["ways"]["plain"]["seconds"]
    rows: list[Row] = []
    for way, told in found["ways"].items():
        seconds, peak = told.get("seconds", 0.0), told.get("peak_bytes", 0)
        fits = 0 < peak <= memory * (100 + _FRAGMENTATION_PERCENT) // 100
        rows.append(
            Row(
                way=way,
                settings=told["settings"],
                batch=found["batch"],
                memory_bytes=memory,
                peak_bytes=peak,
                step_seconds=seconds,
                predicted_seconds=told.get("predicted_seconds", 0.0),
                share=plain / seconds if seconds else 0.0,
                fits=None if way == "plain" else fits,
                goal=_GOAL if way == "auto" else None,
            )
        )
    _print(rows, found["link"], console or Console())
    return rows


def _print(rows: Sequence[Row], link: float, console: Console) -> None:
    memory, batch = rows[0].memory_bytes, rows[0].batch
    title = f"ResNet-50, batch {batch}, {format_bytes(memory)}, {format_bytes(int(link))}/s"
    table = Table(title=title, title_justify="left")
    for heading in ("", "dials", "peak", "fits", "a step", "predicted", "of unlimited", "met"):
        table.add_column(heading, justify="left" if heading in ("", "dials") else "right")
    for row in sorted(rows, key=lambda row: row.way != "plain"):
        refused = not row.peak_bytes
        table.add_row(
            row.way,
            row.settings,
            "refused" if refused else format_bytes(row.peak_bytes),
            "" if row.fits is None or refused else "yes" if row.fits else "NO",
            "" if refused else format_seconds(row.step_seconds),
            format_seconds(row.predicted_seconds) if row.predicted_seconds else "",
            "" if refused else f"{row.share:.1%}",
            "" if row.met is None else "yes" if row.met else f"NO, {row.goal:.0%} is meant",
        )
    console.print(table)
