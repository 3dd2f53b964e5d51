"""``python -m tflms bench scaling``: how planning time grows with the size of a training step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms.errors import InfeasibleError

RESNET_SECONDS = 10.0  # goal for ResNet-50's Keras step
_BATCH = 512  # of the perceptrons
_GROWTH = 2.0  # a row may take so many times what n log n from the first row says


@dataclass(frozen=True, slots=True)
class Row:
    """One graph that was planned.

    Attributes:
        graph: what it is.
        operations: how many it has.
        seconds: of processor time that the planner took, reading the graph included.
        most_seconds: the goal.
        swaps: rule applications in the plan; 0 where the limit was refused.
    """

    graph: str
    operations: int
    seconds: float
    most_seconds: float
    swaps: int

    @property
    def met(self) -> bool:
        """Whether planning was quick enough."""
        return self.seconds <= self.most_seconds


def run(
    *,
    layers: Sequence[int] = (100, 1000, 6000),
    fraction: float = 0.7,
    image: int = 112,
    batch: int = 16,
    console: Console | None = None,
) -> list[Row]:
    """Plan ResNet-50's Keras step and perceptrons of growing depth, and print a table.

    Args:
        layers: depths of the perceptrons; a layer is about 16 operations of the step.
        fraction: the limit, as a share of the predicted plain peak.
        image: edge of ResNet-50's images.
        batch: of ResNet-50.
        console: where to print; by default standard output.
    """
    console = console or Console()
    rows = [_resnet(fraction, image, batch)]
    base: Row | None = None
    for depth in layers:
        row = _perceptron(depth, fraction, base)
        base = base or row
        rows.append(row)
    table = Table(title="planning time", title_justify="left")
    for heading in ("graph", "operations", "processor time", "goal", "steps of the plan", "met"):
        table.add_column(heading, justify="left" if heading == "graph" else "right")
    for row in rows:
        table.add_row(
            row.graph,
            str(row.operations),
            f"{row.seconds:.2f} s",
            f"{row.most_seconds:.2f} s",
            str(row.swaps),
            "yes" if row.met else "NO",
        )
    console.print(table)
    return rows


def _planned(graph: Any, fraction: float, **arguments: Any) -> tuple[float, int]:
    import tflms

    begun = time.process_time()
    try:
        plan = tflms.plan(graph, {"memory_limit": fraction, "batch_size": _BATCH}, **arguments)
        count = len(plan.steps)
    except InfeasibleError:
        count = 0
    return time.process_time() - begun, count


def _perceptron(layers: int, fraction: float, base: Row | None) -> Row:
    from tflms.zoo import graphs

    case = graphs.mlp(layers=layers, width=256, batch=_BATCH, device="/device:EMU:0")
    count = len(case.graph.get_operations())
    seconds, steps = _planned(
        case.graph, fraction, loss=case.loss, fetches=[case.loss, case.train_op]
    )
    goal = seconds
    if base is not None:
        ratio = count * math.log(count) / (base.operations * math.log(base.operations))
        goal = _GROWTH * base.seconds * ratio
    return Row(f"perceptron, {layers} layers", count, seconds, goal, steps)


def _resnet(fraction: float, image: int, batch: int) -> Row:
    import tensorflow as tf

    from tflms.zoo.tasks import task

    subject = task("resnet50", image=image, batch=batch)
    model = subject.compile()
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x, y: model.train_step((x, y)))
    traced = step.get_concrete_function(tf.constant(subject.inputs), tf.constant(subject.labels))
    count = len(traced.graph.get_operations())
    seconds, steps = _planned(traced.graph, fraction)
    return Row("ResNet-50, Keras step", count, seconds, RESNET_SECONDS, steps)
