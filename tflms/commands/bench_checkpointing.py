"""``python -m tflms bench checkpointing``: step times of schedules at equal memory limits."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms.commands.checkpointing_run import Bench, interleaved
from tflms.errors import ConfigError, InfeasibleError
from tflms.units import format_bytes

OURS, PERIODIC = "optimal_checkpointing", "best_periodic"
EXTENSION = "drop_inputs"  # ours as well, and beyond the published programme: no rival
RIVALS = (PERIODIC, "sqrt_n", "revolve", "revolve_heterogeneous")
ALL = ("resnet18", "resnet50", "resnet101", "densenet121", "vgg16", "deep_resnet")
SLOWER = 1.03  # ours may take so much more than the best rival
FASTER_ON_AVERAGE = 1.17  # throughput over best periodic (Beaumont et al. 2019, abstract)
PREDICTED_WITHIN = 0.10  # of the measured step, both over save-all
_ADDRESS_SPACE = 8 * 10**9


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy at one limit.

    Attributes:
        model: what is trained.
        limit_bytes: of the device, variables included.
        strategy: of the rewrite.
        peak_bytes: largest real peak of all steps; 0 where none was run.
        predicted_bytes: what the report predicts; 0 where no schedule fits.
        step_seconds: median over rounds; 0 where none was run.
        times_plain: ``step_seconds`` over that of the step as it is.
        predicted_times_plain: what the schedule promises, by the measured costs.
        throughput: over that of best periodic at the same limit; 0 where one of them does not fit.
        predicted_throughput: likewise.
        met: for ours: within the limit, not slower than the best rival by more than 3 %, and as
            predicted within 10 %.
    """

    model: str
    limit_bytes: int
    strategy: str
    peak_bytes: int = 0
    predicted_bytes: int = 0
    step_seconds: float = 0.0
    times_plain: float = 0.0
    predicted_times_plain: float = 0.0
    throughput: float = 0.0
    predicted_throughput: float = 0.0
    met: bool = True

    @property
    def fits(self) -> bool:
        """Whether there is a schedule of this kind for the limit."""
        return self.predicted_bytes > 0

    @property
    def error(self) -> float:
        """How far the predicted time is above the measured one, both over plain."""
        return self.predicted_times_plain / self.times_plain - 1 if self.times_plain else 0.0


def run(
    *,
    models: Sequence[str] = ("resnet50",),
    image: int | None = None,
    batch: int | None = None,
    limits: Sequence[float] = (0.0, 0.25, 0.5, 0.75),
    rounds: int = 7,
    strategies: Sequence[str] = (*RIVALS, EXTENSION),
    forward_times: float = 1.0,
    plot: str | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Train with each strategy at each limit, in turn, and print what a step takes.

    Costs of operations are measured first. All that is compared at one limit runs in rounds, one
    step of each per round, so that what else the machine does hits all alike.

    Args:
        models: resnet18, resnet50, resnet101, densenet121, vgg16, deep_resnet (164 layers) or mlp
            (30 equal layers); all: the first six.
        image: edge of the images in pixels; each model has its own default.
        batch: examples per step; likewise.
        limits: of device memory; 0 is the least that the optimum can keep, 1 the plain peak.
        rounds: steps that are timed per strategy and limit; 0 prints predictions only.
        strategies: what ours is compared with.
        forward_times: with 0 rounds, predict as if forwards took so many times as long: what the
            ratio of forward to backward does to the gain.
        plot: write a picture of times over limits to this file.
        console: where to print; by default standard output.

    Raises:
        ConfigError: there is no such model, or forwards are to take longer in steps that are run.
    """
    import tensorflow as tf

    from tflms import emulator

    console = console or Console(width=max(110, Console().width))
    if forward_times != 1.0 and rounds:
        raise ConfigError("forward_times is for predictions; add --rounds 0")
    emulator.load(_ADDRESS_SPACE)
    tf.compat.v1.disable_eager_execution()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        names = [m for name in models for m in (ALL if name == "all" else (name,))]
        benches = [Bench(name, image, batch, Path(folder)) for name in names]
        for bench in benches:
            plain_peak = bench.measure()
            if forward_times != 1.0:
                bench.slow_forward(forward_times)
            least = bench.least()
            console.print(
                f"{bench.name}, batch {bench.batch}: plain peak {format_bytes(plain_peak)}, least "
                f"{format_bytes(least)} (told); costs measured, a forward takes "
                f"{bench.forward_share():.2f} of a backward",
                highlight=False,
            )
            for limit in limits:
                nbytes = least + int(limit * (plain_peak - least))
                found = compare(bench, nbytes, [OURS, *strategies], rounds)
                rows += found
                console.print(_table(found))
    for line in conclusions(rows):
        console.print(line, highlight=False)
    if plot is not None:
        _draw(rows, plot)
    return rows


def compare(bench: Bench, limit: int, strategies: Sequence[str], rounds: int) -> list[Row]:
    """Compare strategies at one limit; the plain step runs along."""
    cases: dict[str, Any] = {"plain": bench.build()}
    told: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for name in strategies:
        try:
            cases[name], report = bench.rewritten(name, limit)
        except InfeasibleError:
            continue
        told[name] = report.predicted_seconds / report.plain_seconds
        peaks[name] = report.predicted_peak_bytes
    measured = interleaved(cases, rounds) if rounds else {}
    seconds = {name: one.seconds for name, one in measured.items()}
    rivals = [seconds[name] for name in strategies if name in RIVALS and name in seconds]
    rows = []
    for name in strategies:
        if name not in told:
            rows.append(Row(bench.name, limit, name, met=name != OURS))
            continue
        row = Row(
            model=bench.name,
            limit_bytes=limit,
            strategy=name,
            peak_bytes=measured[name].peak_bytes if rounds else 0,
            predicted_bytes=peaks[name],
            step_seconds=seconds.get(name, 0.0),
            times_plain=seconds[name] / seconds["plain"] if rounds else 0.0,
            predicted_times_plain=told[name],
            throughput=seconds.get(PERIODIC, 0.0) / seconds[name] if rounds else 0.0,
            predicted_throughput=told.get(PERIODIC, 0.0) / told[name],
        )
        rows.append(_judged(row, min(rivals, default=float("inf"))))
    return rows


def _judged(row: Row, best_rival_seconds: float) -> Row:
    if row.strategy != OURS:
        return row
    met = (
        row.peak_bytes <= row.limit_bytes
        and row.step_seconds <= SLOWER * best_rival_seconds
        and abs(row.error) <= PREDICTED_WITHIN
    )
    return replace(row, met=met)


def conclusions(rows: Sequence[Row]) -> list[str]:
    """Say for each model, and for all, how ours compares with best periodic, and why not better."""
    lines = []
    models = list(dict.fromkeys(row.model for row in rows))
    for model in [*models, ""] if len(models) > 1 else models:
        here = [row for row in rows if model in ("", row.model)]
        both = [row for row in here if row.strategy == OURS and row.predicted_throughput]
        alone = sum(row.strategy == OURS and row.fits for row in here) - len(both)
        text = f"{model or 'all'}: "
        if not both:
            lines.append(text + "nowhere did both the optimum and best periodic fit")
            continue
        at = {(row.model, row.limit_bytes) for row in both}
        periodic = [r for r in here if r.strategy == PERIODIC and (r.model, r.limit_bytes) in at]
        text += f"throughput over best periodic, mean of {len(both)} limits: "
        if both[0].throughput:
            text += f"measured {_mean(r.throughput for r in both):.3f}, "
        text += (
            f"predicted {_mean(r.predicted_throughput for r in both):.3f} (aim "
            f"{FASTER_ON_AVERAGE}); best periodic takes "
            f"{_mean(r.predicted_times_plain for r in periodic):.3f} of save-all (predicted), the "
            "most that could be gained"
        )
        lines.append(text + (f"; at {alone} more limits it does not fit" if alone else ""))
    run_rows = [row for row in rows if row.step_seconds]
    if run_rows:
        over = [row for row in run_rows if row.peak_bytes > row.limit_bytes]
        off = max(run_rows, key=lambda row: abs(row.error))
        lines.append(
            f"real peak over the limit in {len(over)} of {len(run_rows)} rows; predicted over "
            f"measured time, median {_median(r.error for r in run_rows):+.1%}, worst "
            f"{off.error:+.1%} ({off.model}, {off.strategy}, {format_bytes(off.limit_bytes)})"
        )
    return lines


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title=f"{rows[0].model}, limit {format_bytes(rows[0].limit_bytes)}")
    headings = ("", "peak", "(told)", "step", "x plain", "(told)", "x periodic", "(told)", "met")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        if not row.fits:
            table.add_row(row.strategy, *["-"] * 7, "" if row.met else "NO")
            continue
        done = row.step_seconds > 0
        table.add_row(
            row.strategy, format_bytes(row.peak_bytes) if done else "",
            format_bytes(row.predicted_bytes), f"{row.step_seconds:.3f} s" if done else "",
            f"{row.times_plain:.3f}" if done else "", f"{row.predicted_times_plain:.3f}",
            f"{row.throughput:.3f}" if row.throughput else "",
            f"{row.predicted_throughput:.3f}" if row.predicted_throughput else "",
            ("yes" if row.met else "NO") if row.strategy == OURS and done else "",
        )  # fmt: skip
    return table


def _draw(rows: Sequence[Row], path: str) -> None:
    """One picture a model: points are measured, lines predicted."""
    from matplotlib import figure

    models = list(dict.fromkeys(row.model for row in rows))
    drawn = figure.Figure(figsize=(6 * len(models), 4), layout="constrained")
    for axes, model in zip(drawn.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        here = [row for row in rows if row.model == model and row.fits]
        for name in dict.fromkeys(row.strategy for row in here):
            own = [row for row in here if row.strategy == name]
            limits = [row.limit_bytes / 1e6 for row in own]
            (line,) = axes.plot(limits, [row.predicted_times_plain for row in own], label=name)
            if own[0].step_seconds:
                axes.plot(limits, [row.times_plain for row in own], "o", color=line.get_color())
        axes.set_title(model)
        axes.set_xlabel("memory limit (MB)")
        axes.set_ylabel("step time over save-all")
        axes.legend()
    drawn.savefig(path, dpi=120)
