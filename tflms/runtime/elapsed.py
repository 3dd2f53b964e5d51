"""Tells how much of a traced step's time each operation took, where several ran side by side.

Two products that run at the same time on the same cores take each about twice as long as alone.
Added up, such durations exceed the step; so time in which several operations run is divided among
them. What all take together is then the time in which the device was busy.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One run of one operation, from begin to end in nanoseconds."""

    name: str
    begin: int
    end: int


def spans(step_stats: Any, names: Container[str]) -> list[Span]:
    """Return the runs of the named operations in a trace (``StepStats``).

    Its microseconds are whole numbers: a small kernel's often 0. So it is the nanoseconds.
    """
    return [
        Span(
            node.node_name,
            node.all_start_nanos + node.op_start_rel_nanos,
            node.all_start_nanos + node.op_end_rel_nanos,
        )
        for device in step_stats.dev_stats
        for node in device.node_stats
        if node.node_name in names
    ]


def shared(step: Iterable[Span]) -> dict[str, float]:
    """Return the seconds that each operation took of a step."""
    events: list[tuple[int, int, int, str]] = []
    for number, span in enumerate(step):
        # Ends come before begins at the same time; what takes no time begins before it ends.
        events.append((span.begin, 1, number, span.name))
        events.append(
            (max(span.end, span.begin), 0 if span.end > span.begin else 2, number, span.name)
        )
    events.sort()
    running: dict[int, str] = {}
    taken: dict[str, float] = {}
    before = 0
    for moment, kind, number, name in events:
        for other in running.values():
            taken[other] += (moment - before) * 1e-9 / len(running)
        before = moment
        if kind == 1:
            running[number] = name
            taken.setdefault(name, 0.0)
        else:
            del running[number]
    return taken


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return for each operation the median over several steps; one that did not run took none."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
