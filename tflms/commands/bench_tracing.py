"""Measures what rewriting adds to the time in which TensorFlow traces the same training step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms.config import Config

# The three models, with settings small enough for any machine: tracing time does not depend on the
# size of tensors, only on the number of operations.
MODELS: dict[str, dict[str, int]] = {
    "resnet50": {"image": 112},
    "unet3d": {"size": 32, "filters": 8},
    "transformer": {"layers": 12},
}
BATCH = 4


@dataclass(frozen=True, slots=True)
class Tracing:
    """How long one model's training step takes to trace.

    Attributes:
        model: its name in the zoo.
        operations: in the traced graph.
        plain_seconds: TensorFlow alone; median over the repeats.
        rewritten_seconds: TensorFlow and the rewrite; median over the repeats.
        swaps: values that the rewrite parked.
        met: whether the median over all models of a run was within its goal.
    """

    model: str
    operations: int
    plain_seconds: float
    rewritten_seconds: float
    swaps: int
    met: bool = True

    @property
    def overhead(self) -> float:
        """What rewriting adds, as a share of the time of TensorFlow alone."""
        return self.rewritten_seconds / self.plain_seconds - 1


def run(
    *,
    models: Sequence[str] = tuple(MODELS),
    repeats: int = 3,
    strategy: str = "chain_rule",
    most_added: float = 0.25,
    console: Console | None = None,
) -> list[Tracing]:
    """Trace each model's training step, plain and rewritten in turn, and print a table.

    Nothing is run: the step is traced for its shapes alone.

    Args:
        models: names out of the zoo.
        repeats: traces of each kind; the first of all is thrown away.
        strategy: how to rewrite.
        most_added: goal: what rewriting may add at most, as a share, in the median of the models.
        console: where the table goes; None: to the screen.
    """
    results = [_measure(name, repeats, Config(strategy=strategy)) for name in models]
    met = median_overhead(results) <= most_added
    (console or Console()).print(_table(results))
    return [dataclasses.replace(result, met=met) for result in results]


def median_overhead(results: Sequence[Tracing]) -> float:
    """Return the median over the models of what rewriting adds."""
    return statistics.median(result.overhead for result in results)


def _measure(name: str, repeats: int, config: Config) -> Tracing:
    import keras
    import tensorflow as tf

    from tflms.runtime.function import function
    from tflms.zoo.tasks import task

    subject = task(name, batch=BATCH, **MODELS.get(name, {}))
    model = subject.compile(keras.optimizers.Adam(1e-3))
    model.optimizer.build(model.trainable_variables)
    batch = (tf.constant(subject.inputs), tf.constant(subject.labels))

    def seconds(make: Callable[[Any], Any]) -> tuple[float, Any]:
        step = make(lambda x, y: model.train_step((x, y)))
        started = time.perf_counter()
        concrete = step.get_concrete_function(*batch)
        taken = time.perf_counter() - started
        return taken, (step, len(concrete.graph.get_operations()))

    seconds(tf.function)  # the first trace also builds what the model builds once
    plain: list[float] = []
    rewritten: list[float] = []
    for _ in range(repeats):
        taken, (_, operations) = seconds(tf.function)
        plain.append(taken)
        taken, (step, _) = seconds(lambda step: function(step, config))
        rewritten.append(taken)
    return Tracing(
        name,
        operations,
        statistics.median(plain),
        statistics.median(rewritten),
        len(step.report().swaps),
    )


def _table(results: Sequence[Tracing]) -> Table:
    table = Table(title="tracing a training step (measured)", title_justify="left")
    for heading in ("model", "operations", "TensorFlow", "and rewriting", "added", "swaps"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for r in results:
        table.add_row(
            r.model, str(r.operations), f"{r.plain_seconds:.2f} s", f"{r.rewritten_seconds:.2f} s",
            f"{r.overhead:.1%}", str(r.swaps),
        )  # fmt: skip
    if results:
        table.add_row("median", "", "", "", f"{median_overhead(results):.1%}", "")
    return table
