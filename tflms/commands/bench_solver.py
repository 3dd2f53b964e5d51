"""``python -m tflms bench solver``: time and memory of the checkpointing solver on deep chains."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from tflms.checkpointing import Chain, minimum_memory, optimal_schedule, save_all
from tflms.errors import ConfigError
from tflms.units import format_bytes

_GOALS = {100: 0.3, 339: 4.0}  # seconds at 500 slots on two cores
_GOAL_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, made in a process of its own.

    Attributes:
        chain: ``resnet`` or ``random``.
        stages: length of the chain, its loss included.
        share: the limit, as a share of the way from the least that works to what saving all needs.
        slots: as given to the solver.
        seconds: median time of ``optimal_schedule``.
        growth_bytes: by how much the peak of the process's resident memory grew.
        exact: whether the solver could do without rounding.
        makespan_ratio: makespan of the schedule over that of saving all.
        peak_bytes: predicted peak of the schedule.
        limit_bytes: the limit.
        goal_seconds: what the solver is meant to take, or None.
    """

    chain: str
    stages: int
    share: float
    slots: int
    seconds: float
    growth_bytes: int
    exact: bool
    makespan_ratio: float
    peak_bytes: int
    limit_bytes: int
    goal_seconds: float | None

    @property
    def met(self) -> bool:
        """Whether time and memory are within what is meant."""
        in_time = self.goal_seconds is None or self.seconds <= self.goal_seconds
        return in_time and self.growth_bytes <= _GOAL_BYTES and self.peak_bytes <= self.limit_bytes


def resnet_chain(stages: int, batch: int = 64) -> Chain:
    """Return the chain of a pre-activation bottleneck ResNet for 32x32 images; 339 is ResNet-1001.

    Six stages are not blocks: the first convolution, and normalisation, ReLU, pooling, classifier
    and loss at the end. Sizes are those of the float32 activations; a block saves three times
    its output (its first ReLU, four inner activations of a quarter, the output). Times are those of
    10 Tflop/s and 500 GB/s: unequal, as on a device, but repeatable.

    Source of the architecture: He et al., "Identity mappings in deep residual networks" (2016).

    Raises:
        ConfigError: there are fewer than 9 stages.
    """
    if stages < 9:
        raise ConfigError(f"a ResNet has at least 9 stages, not {stages}")
    outputs, saved, seconds = [batch * 32 * 32 * 3 * 4], [], []

    def add(nbytes: int, kept: int, flops: float) -> None:
        seconds.append(flops / 10e12 + (outputs[-1] + 2 * kept) / 500e9)
        outputs.append(nbytes)
        saved.append(kept)

    add(batch * 32 * 32 * 16 * 4, batch * 32 * 32 * 16 * 4, batch * 32 * 32 * 2 * 27 * 16)
    blocks = stages - 6
    for block in range(blocks):
        group = 3 * block // blocks
        width, side = 64 << group, 32 >> group
        nbytes = batch * side * side * width * 4
        add(nbytes, 3 * nbytes, batch * side * side * 2 * 17 / 16 * width**2)
    last = outputs[-1]
    add(last, last, 0)
    add(last, last, 0)
    add(batch * 256 * 4, batch * 256 * 4, 0)
    add(batch * 10 * 4, batch * 10 * 4, batch * 2 * 256 * 10)
    add(0, 0, 0)
    return Chain(seconds, [2 * value for value in seconds], outputs, saved)


def random_chain(stages: int) -> Chain:
    """Return a chain whose times and sizes follow no pattern, so that the solver has to round."""
    random = np.random.default_rng(stages)
    seconds = random.uniform(0.5, 1.5, stages)
    outputs = random.integers(500_000, 1_500_000, stages + 1)
    return Chain(seconds, 2 * seconds, outputs, outputs[1:] * random.integers(1, 6, stages))


def run(
    *,
    stages: Sequence[int] = (100, 200, 339),
    shares: Sequence[float] = (0.0, 0.1, 0.3, 0.6),
    slots: int = 500,
    repeats: int = 3,
    console: Console | None = None,
) -> list[Row]:
    """Measure the solver, print a table and return its rows.

    Each row is measured in a fresh process, so that its growth of memory is its own.

    Args:
        stages: lengths of the chains.
        shares: limits, from 0 (the least that works) to 1 (all can be saved).
        slots: into how many parts to divide the memory.
        repeats: of how many runs to take the median.
        console: where to print; default: standard output.
    """
    context = multiprocessing.get_context("spawn")
    tasks = [
        (name, n, share, slots, repeats)
        for name in ("resnet", "random")
        for n in stages
        for share in shares
    ]
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        rows = list(pool.map(_measure, *zip(*tasks, strict=True)))
    _print(rows, console or Console())
    return rows


def _measure(name: str, stages: int, share: float, slots: int, repeats: int) -> Row:
    chain = resnet_chain(stages) if name == "resnet" else random_chain(stages)
    least, most = minimum_memory(chain), save_all(chain).peak_bytes
    limit = least + int(share * (most - least))
    before = _peak_resident_bytes()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        schedule = optimal_schedule(chain, limit, slots)
        times.append(time.perf_counter() - start)
    return Row(
        chain=name,
        stages=stages,
        share=share,
        slots=slots,
        seconds=statistics.median(times),
        growth_bytes=_peak_resident_bytes() - before,
        exact=schedule.exact,
        makespan_ratio=schedule.makespan / chain.least_seconds,
        peak_bytes=schedule.peak_bytes,
        limit_bytes=limit,
        goal_seconds=_GOALS.get(stages) if slots <= 500 else None,
    )


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="Checkpointing solver: optimal_schedule")
    for heading in ("chain", "stages", "slots", "limit", "of the way", "time", "goal", "memory"):
        table.add_column(heading, justify="left" if heading == "chain" else "right")
    for heading in ("exact", "makespan", "peak of limit", "met"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.chain,
            str(row.stages),
            str(row.slots),
            format_bytes(row.limit_bytes),
            f"{row.share:.0%}",
            f"{row.seconds:.2f} s",
            "" if row.goal_seconds is None else f"{row.goal_seconds:.1f} s",
            format_bytes(row.growth_bytes),
            "yes" if row.exact else "no",
            f"{row.makespan_ratio:.3f}",
            f"{row.peak_bytes / row.limit_bytes:.3f}",
            "yes" if row.met else "NO",
        )
    console.print(table)
