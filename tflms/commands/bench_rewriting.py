"""Measures how long it takes to rewrite training graphs of about 7,000 operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

STAGES_OF_RESNET101 = (3, 4, 23, 3)


@dataclass(frozen=True, slots=True)
class Rewriting:
    """How long one graph takes to rewrite.

    Attributes:
        graph: what it trains.
        operations: in it.
        swaps: values that the rewrite parked.
        seconds: median over the repeats, each on a graph built anew.
        met: whether that is within the goal.
    """

    graph: str
    operations: int
    swaps: int
    seconds: float
    met: bool


def run(
    *,
    strategy: str = "chain_rule",
    repeats: int = 3,
    most_seconds: float = 2.0,
    console: Console | None = None,
) -> list[Rewriting]:
    """Rewrite each graph, and print a table. Nothing is trained.

    Args:
        strategy: how to rewrite.
        repeats: graphs of each kind, after one that is thrown away.
        most_seconds: goal: the median for each graph.
        console: where the table goes; None: to the screen.
    """
    from tflms.zoo import graphs

    builders: dict[str, Callable[[], Any]] = {
        "MLP, 360 layers": lambda: graphs.mlp(layers=360, width=8, batch=512),
        "ResNet-101": lambda: graphs.resnet50(
            image=32, batch=4, width=16, stages=STAGES_OF_RESNET101
        ),
    }
    results = [
        _measure(name, build, strategy, repeats, most_seconds) for name, build in builders.items()
    ]
    table = Table(title="rewriting a graph (measured)", title_justify="left")
    for heading in ("graph", "operations", "swaps", "seconds"):
        table.add_column(heading, justify="left" if heading == "graph" else "right")
    for r in results:
        table.add_row(r.graph, str(r.operations), str(r.swaps), f"{r.seconds:.2f}")
    (console or Console()).print(table)
    return results


def _measure(
    name: str, build: Callable[[], Any], strategy: str, repeats: int, most_seconds: float
) -> Rewriting:
    import tflms

    config = {"strategy": strategy, "min_swap_bytes": 0}
    taken: list[float] = []
    operations = swaps = 0
    for _ in range(repeats + 1):
        made = build()
        operations = len(made.graph.get_operations())
        started = time.perf_counter()
        report = tflms.rewrite(
            made.graph, config, loss=made.loss, fetches=[made.train_op, made.loss]
        )
        taken.append(time.perf_counter() - started)
        swaps = len(report.swaps)
    seconds = statistics.median(taken[1:])
    return Rewriting(name, operations, swaps, seconds, seconds <= most_seconds)
