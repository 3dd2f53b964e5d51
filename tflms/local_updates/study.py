"""Compares methods: steps to a loss, cost and time, and each chunk's gradient with the true one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tflms.errors import ConfigError
from tflms.local_updates.cost import step_cost
from tflms.local_updates.sweep import Sweep
from tflms.local_updates.trainer import LocalTrainer
from tflms.local_updates.windows import Window


@dataclass(frozen=True, slots=True)
class Run:
    """One method at one batch size, trained until a loss or for a number of steps.

    Attributes:
        method: the method's name in the study.
        batch_size: examples a step.
        steps: steps until the running loss was at the cutoff, or None where it never was.
        losses: the last exit's loss of every step.
        cost_flops: total FLOPs of these steps.
        time_flops: serial FLOPs of these steps, the batch counted as parallel.
    """

    method: str
    batch_size: int
    steps: int | None
    losses: tuple[float, ...]
    cost_flops: float | None
    time_flops: float | None


def study(
    methods: dict[str, Callable[[int], LocalTrainer]],
    data: tuple[Any, Any],
    *,
    batch_sizes: Sequence[int],
    cutoff: float,
    steps: int,
    optimizer: Callable[[], Any],
    loss: Any,
    seed: int = 0,
    picture: str | Path | None = None,
) -> list[Run]:
    """Run methods at batch sizes, count what each takes to reach a loss, and draw the frontier.

    Args:
        methods: by name, a function from the batch size to a fresh trainer.
        data: arrays of examples and labels.
        batch_sizes: the batch sizes.
        cutoff: loss to reach (mean of the last ten steps).
        steps: steps after which a run is given up.
        optimizer: makes an optimizer.
        loss: the task loss.
        seed: seed of the order of examples, the same for every method.
        picture: file for cost against time of all runs, see ``draw``; None draws nothing.

    Returns:
        One record per method and batch size.
    """
    if not methods or steps < 1:
        raise ConfigError("study() needs a method and a number of steps of 1 or more")
    found = []
    for name, make in methods.items():
        for batch_size in batch_sizes:
            trainer = make(batch_size)
            trainer.compile(optimizer=optimizer(), loss=loss)
            losses = training_losses(trainer, data, batch_size=batch_size, steps=steps, seed=seed)
            reached = _reached(losses, cutoff)
            cost = step_cost(trainer)
            scale = batch_size / cost.batch_size
            found.append(
                Run(
                    method=name,
                    batch_size=batch_size,
                    steps=reached,
                    losses=tuple(losses),
                    cost_flops=None if reached is None else reached * cost.total_flops * scale,
                    time_flops=(
                        None if reached is None else reached * cost.serial_flops / cost.batch_size
                    ),
                )
            )
    if picture is not None:
        draw(found, picture)
    return found


def training_losses(
    trainer: LocalTrainer, data: tuple[Any, Any], *, batch_size: int, steps: int, seed: int = 0
) -> list[float]:
    """Train on batches drawn by the seed alone and return the last exit's loss of each step."""
    x, y = data

    @tf.function(autograph=False)
    def step(inputs: Any, labels: Any) -> Any:
        return Sweep(trainer.stages).run([inputs], labels, None)[-1].loss

    random = np.random.default_rng(seed)
    losses = []
    for _ in range(steps):
        chosen = random.integers(0, len(x), batch_size)
        losses.append(float(step(tf.constant(x[chosen]), tf.constant(y[chosen]))))
    return losses


def _reached(losses: Sequence[float], cutoff: float) -> int | None:
    for end in range(10, len(losses) + 1):
        if sum(losses[end - 10 : end]) / 10 <= cutoff:
            return end
    return None


def frontier(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that no other beats in both cost and time, the cheapest first."""
    reached = [run for run in runs if run.steps is not None]
    best: list[Run] = []
    for run in sorted(reached, key=lambda r: (r.cost_flops or 0, r.time_flops or 0)):
        if not best or (run.time_flops or 0) < (best[-1].time_flops or 0):
            best.append(run)
    return best


def draw(runs: Sequence[Run], path: str | Path) -> None:
    """Draw cost against time of all runs, and the frontier dashed (needs matplotlib)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in dict.fromkeys(run.method for run in runs):
        mine = [run for run in runs if run.method == name and run.steps is not None]
        axes.plot(
            [run.time_flops for run in mine], [run.cost_flops for run in mine], "o", label=name
        )
    best = frontier(runs)
    axes.plot([r.time_flops for r in best], [r.cost_flops for r in best], "k--", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="time: serial FLOPs", ylabel="cost: total FLOPs")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def gradient_cosines(trainer: LocalTrainer, x: Any, y: Any) -> list[float]:
    """Return per chunk the cosine between its local gradient and that of backpropagation.

    Neither weights nor optimizers change; states of BatchNorm and dropout move by one forward pass
    of each kind. The last chunk's cosine is 1 where its window is its own or reaches back.
    """
    local = _gradients(trainer, trainer.windows, x, y)
    whole = _gradients(trainer, (Window(0, len(trainer.stages) - 1),), x, y)
    found = []
    for mine, true in zip(local, whole, strict=True):
        if mine is None:
            found.append(0.0)
            continue
        assert true is not None
        norm = float(np.linalg.norm(mine) * np.linalg.norm(true))
        found.append(float(mine @ true) / norm if norm else 0.0)
    return found


class _Recorder:
    """Stands in for an optimizer: keeps the gradients and updates nothing."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []

    def scale_loss(self, loss: Any) -> Any:
        return loss

    def apply_gradients(self, pairs: Any) -> None:
        self.gradients = [
            tf.zeros_like(variable) if gradient is None else gradient
            for gradient, variable in pairs
        ]


def _gradients(
    trainer: LocalTrainer, windows: Sequence[Window], x: Any, y: Any
) -> list[np.ndarray | None]:
    stages = [stage.recorded_by(_Recorder(), windows) for stage in trainer.stages]
    inputs = [tf.convert_to_tensor(t) for t in keras.tree.flatten(x)]
    Sweep(stages).run(inputs, tf.convert_to_tensor(y), None)
    found: list[np.ndarray | None] = []
    for stage in stages:
        count = len(stage.block.trainable_variables)
        flat = [np.asarray(g).ravel() for g in stage.optimizer.gradients[:count]]
        found.append(np.concatenate(flat).astype(np.float64) if flat else None)
    return found
