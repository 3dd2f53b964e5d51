"""``python -m tflms bench checkpointing``: step times of schedules at equal memory limits."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms.commands.bench_memory import run_steps
from tflms.errors import ConfigError, InfeasibleError
from tflms.units import format_bytes

RIVALS = ("best_periodic", "sqrt_n", "revolve", "revolve_heterogeneous")
OURS = "optimal_checkpointing"
SLOWER = 1.03  # ours may take so much more than the best rival
FASTER_ON_AVERAGE = 1.17  # throughput over best periodic (Beaumont et al. 2019, abstract)
_ADDRESS_SPACE = 8 * 10**9


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy at one limit.

    Attributes:
        model: what is trained.
        limit_bytes: of the device, variables included.
        strategy: of the rewrite.
        peak_bytes: real peak of the device's allocator; 0 where no schedule fits.
        predicted_bytes: what the report predicts.
        step_seconds: median over rounds; 0 where no schedule fits.
        times_plain: ``step_seconds`` over that of the step as it is.
        predicted_times_plain: what the schedule promises, by the measured costs.
        throughput: over that of best periodic at the same limit; 0 where one of them does not fit.
        met: for ours: within the limit, and not slower than the best rival by more than 3 %.
    """

    model: str
    limit_bytes: int
    strategy: str
    peak_bytes: int
    predicted_bytes: int
    step_seconds: float
    times_plain: float
    predicted_times_plain: float
    throughput: float
    met: bool = True


def run(
    *,
    model: str = "resnet50",
    image: int = 112,
    batch: int = 16,
    limits: Sequence[float] = (0.02, 0.2, 0.4, 0.7),
    rounds: int = 7,
    strategies: Sequence[str] = RIVALS,
    plot: str | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Train with each strategy at each limit, in turn, and print what a step takes.

    Costs of operations are measured first. All that is compared at one limit runs in rounds, one
    step of each per round, so that what else the machine does hits all alike.

    Args:
        model: resnet50, resnet101, vgg16 or mlp (30 equal layers).
        image: edge of the images in pixels.
        batch: examples per step (128 times as many for the mlp).
        limits: of device memory; 0 is the least that the optimum can keep, 1 the plain peak.
        rounds: steps that are timed per strategy and limit.
        strategies: rivals.
        plot: write a picture of times over limits to this file.
        console: where to print; by default standard output.

    Raises:
        ConfigError: there is no such model.
    """
    import tensorflow as tf

    from tflms import emulator

    console = console or Console(width=max(100, Console().width))
    emulator.load(_ADDRESS_SPACE)
    tf.compat.v1.disable_eager_execution()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(model, image, batch, Path(folder) / "costs.json")
        plain_peak = bench.measure()
        least = bench.least()
        console.print(
            f"{model}: plain peak {format_bytes(plain_peak)}, least {format_bytes(least)} (told); "
            "costs measured"
        )
        for limit in limits:
            nbytes = least + int(limit * (plain_peak - least))
            found = bench.at_limit(nbytes, [OURS, *strategies], rounds)
            rows += found
            console.print(_table(found))
    console.print(_conclusion(rows), highlight=False)
    if plot is not None:
        _draw(rows, plot)
    return rows


class _Bench:
    def __init__(self, model: str, image: int, batch: int, costs: Path) -> None:
        self.model, self.image, self.batch, self.costs = model, image, batch, costs

    def build(self) -> Any:
        from tflms import emulator
        from tflms.zoo import graphs

        device = emulator.device
        if self.model == "mlp":
            return graphs.mlp(batch=128 * self.batch, device=device)
        if self.model == "resnet50":
            return graphs.resnet50(self.image, self.batch, device=device)
        if self.model == "resnet101":
            return graphs.resnet50(self.image, self.batch, stages=(3, 4, 23, 3), device=device)
        if self.model == "vgg16":
            return graphs.vgg16(self.image, self.batch, device=device)
        raise ConfigError(f"no model {self.model!r}; write resnet50, resnet101, vgg16 or mlp")

    def measure(self) -> int:
        """Measure costs and the plain peak; return the latter."""
        from tflms.runtime.measure import measure_costs

        case = self.build()
        measure_costs(
            case.graph, fetches=[case.loss, case.train_op], feeds=case.feed_dict(0),
            init=case.init_op,
        ).save(self.costs)  # fmt: skip
        return run_steps(case, 2)[0]

    def least(self) -> int:
        """Return the least limit that the optimum can keep, by prediction."""
        try:
            self._rewritten(OURS, 1)
        except InfeasibleError as error:
            return error.minimum_bytes or 0
        return 0

    def _rewritten(self, strategy: str, limit: int) -> tuple[Any, Any]:
        import tflms

        case = self.build()
        config = {
            "strategy": strategy,
            "memory_limit": limit,
            "cost": str(self.costs),
            "batch_size": 128 * self.batch if self.model == "mlp" else None,
        }
        fetches = [case.loss, case.train_op]
        return case, tflms.rewrite(case.graph, config, loss=case.loss, fetches=fetches)

    def at_limit(self, limit: int, strategies: Sequence[str], rounds: int) -> list[Row]:
        """Compare strategies at one limit; the plain step runs along."""
        cases: dict[str, Any] = {"plain": self.build()}
        reports: dict[str, Any] = {}
        peaks: dict[str, int] = {}
        for name in strategies:
            try:
                case, reports[name] = self._rewritten(name, limit)
            except InfeasibleError:
                continue
            cases[name] = case
            peaks[name] = run_steps(case, 2)[0]
        seconds = _interleaved(cases, rounds)
        periodic = seconds.get("best_periodic", 0.0)
        best = min((s for n, s in seconds.items() if n not in ("plain", OURS)), default=None)
        rows = []
        for name in strategies:
            if name not in reports:
                rows.append(Row(self.model, limit, name, 0, 0, 0.0, 0.0, 0.0, 0.0, name != OURS))
                continue
            report, taken = reports[name], seconds[name]
            quick = best is None or taken <= SLOWER * best
            rows.append(
                Row(
                    model=self.model,
                    limit_bytes=limit,
                    strategy=name,
                    peak_bytes=peaks[name],
                    predicted_bytes=report.predicted_peak_bytes,
                    step_seconds=taken,
                    times_plain=taken / seconds["plain"],
                    predicted_times_plain=report.predicted_seconds / report.plain_seconds,
                    throughput=periodic / taken,
                    met=name != OURS or (peaks[name] <= limit and quick),
                )
            )
        return rows


def _interleaved(cases: dict[str, Any], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each case; one step of each in every round."""
    import tensorflow as tf

    taken: dict[str, list[float]] = {name: [] for name in cases}
    with contextlib.ExitStack() as stack:
        sessions = {}
        for name, case in cases.items():
            sessions[name] = stack.enter_context(tf.compat.v1.Session(graph=case.graph))
            sessions[name].run(case.init_op)
            sessions[name].run([case.loss, case.train_op], case.feed_dict(0))
        for step in range(1, rounds + 1):
            names = list(cases)  # another one comes first in each round
            for name in names[step % len(names) :] + names[: step % len(names)]:
                case = cases[name]
                feeds = case.feed_dict(step)
                begun = time.perf_counter()
                sessions[name].run([case.loss, case.train_op], feeds)
                taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in taken.items()}


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title=f"{rows[0].model}, limit {format_bytes(rows[0].limit_bytes)}")
    for heading in ("", "peak", "(told)", "step", "x plain", "(told)", "x periodic", "met"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in rows:
        if not row.step_seconds:
            table.add_row(row.strategy, *["-"] * 6, "")
            continue
        table.add_row(
            row.strategy, format_bytes(row.peak_bytes), format_bytes(row.predicted_bytes),
            f"{row.step_seconds:.3f} s", f"{row.times_plain:.2f}",
            f"{row.predicted_times_plain:.2f}", f"{row.throughput:.2f}" if row.throughput else "-",
            ("yes" if row.met else "NO") if row.strategy == OURS else "",
        )  # fmt: skip
    return table


def _conclusion(rows: Sequence[Row]) -> str:
    ours = [row for row in rows if row.strategy == OURS]
    compared = [row.throughput for row in ours if row.throughput]
    alone = sum(1 for row in ours if row.step_seconds and not row.throughput)
    if not compared:
        return "nowhere did both the optimum and best periodic fit"
    mean = statistics.fmean(compared)
    verdict = "reached" if mean >= FASTER_ON_AVERAGE else "not reached"
    return (
        f"throughput over best periodic, mean of {len(compared)} limits: {mean:.3f} "
        f"(17 % more is what the paper reports; {verdict} here); at {alone} further limits best "
        "periodic does not fit"
    )


def _draw(rows: Sequence[Row], path: str) -> None:
    from matplotlib import figure

    drawn = figure.Figure(figsize=(7, 4), layout="constrained")
    axes = drawn.subplots()
    for name in dict.fromkeys(row.strategy for row in rows):
        points = [(r.limit_bytes / 1e6, r.times_plain) for r in rows
                  if r.strategy == name and r.step_seconds]  # fmt: skip
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel("memory limit (MB)")
    axes.set_ylabel("step time over plain")
    axes.legend()
    drawn.savefig(path, dpi=120)
