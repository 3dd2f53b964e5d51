"""Benches of the planner on the emulated accelerator: peaks, the largest batch, planning time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tflms.errors import InfeasibleError

Build = Callable[..., Any]  # keyword arguments -> TrainingGraph


@dataclass(frozen=True, slots=True)
class Peak:
    """One run of one plan: all but ``real_bytes`` and ``step_seconds`` are predictions."""

    limit_bytes: int
    predicted_bytes: int
    real_bytes: int
    floor_bytes: int
    step_seconds: float
    planning_seconds: float
    swaps: int


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


def peaks(build: Build, limits: Sequence[float | int], **arguments: Any) -> list[Peak]:
    """Plan a training graph for each limit, train, and put predicted beside real peak."""
    import tflms

    found: list[Peak] = []
    for limit in limits:
        case = build(**arguments)
        begun = time.perf_counter()
        report = tflms.rewrite(
            case.graph, {"memory_limit": limit}, loss=case.loss, fetches=[case.loss, case.train_op]
        )
        planning = time.perf_counter() - begun
        real, seconds = run_steps(case)
        nbytes = int(limit * report.plain_peak_bytes) if isinstance(limit, float) else limit
        found.append(
            Peak(
                nbytes,
                report.predicted_peak_bytes,
                real,
                report.floor_bytes or 0,
                seconds,
                planning,
                len(report.swaps),
            )
        )
    return found


def largest_batch(
    build: Build, limit_bytes: int, *, plain: bool, most: int = 1 << 12, **arguments: Any
) -> int:
    """Find by bisection the largest batch that is predicted to fit, as it is or with a plan."""
    import tflms

    def fits(batch: int) -> bool:
        case = build(batch=batch, **arguments)
        config = {"memory_limit": limit_bytes}
        try:
            plan = tflms.plan(
                case.graph, config, loss=case.loss, fetches=[case.loss, case.train_op]
            )
        except InfeasibleError:
            return False
        return not plan.changes if plain else True

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def scaling(
    build: Build, sizes: Sequence[dict[str, Any]], fraction: float
) -> list[tuple[int, float]]:
    """Plan graphs of growing size; return their numbers of operations and the seconds."""
    import tflms

    found: list[tuple[int, float]] = []
    for arguments in sizes:
        case = build(**arguments)
        begun = time.perf_counter()
        tflms.plan(case.graph, {"memory_limit": fraction}, loss=case.loss,
                   fetches=[case.loss, case.train_op])  # fmt: skip
        found.append((len(case.graph.get_operations()), time.perf_counter() - begun))
    return found
