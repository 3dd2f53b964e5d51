"""``python -m tflms bench max-batch``: the largest batch that trains in a fixed device memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms.commands.children import run_job
from tflms.commands.job import Job, Outcome
from tflms.errors import ConfigError, TflmsError
from tflms.units import format_bytes, parse_bytes

_UNLIMITED = 16 * 10**9  # address space only: pages become real when they are written
GOALS = {"resnet50": 3.0}  # times the plain batch
AUTO_GOALS = {"resnet50": 5.5, "unet3d": 3.0}


@dataclass(frozen=True, slots=True)
class Row:
    """The largest batch of one way to train.

    Attributes:
        model: builder in ``tflms.zoo.graphs``.
        memory_bytes: of the emulated device.
        way: ``plain``, or the strategy of the rewrite.
        batch: the largest that trained; 0 where not even 1 did.
        failed_batch: the smallest that was seen to fail.
        failure: how that failed.
        peak_bytes: real peak at ``batch``.
        step_seconds: of the last step at ``batch``.
        times_plain: ``batch`` over the plain one.
        goal: what ``times_plain`` is meant to be at least; None for no goal.
    """

    model: str
    memory_bytes: int
    way: str
    batch: int
    failed_batch: int
    failure: str
    peak_bytes: int
    step_seconds: float
    times_plain: float
    goal: float | None

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.goal is None or self.times_plain >= self.goal


def run(
    *,
    model: str = "resnet50",
    memory: str | None = None,
    plain_batch: int = 8,
    strategy: str = "chain_rule",
    lb: int = 1,
    branch_threshold: int = 8,
    image: int = 112,
    size: int = 32,
    steps: int = 3,
    resolution: float = 0.03,
    console: Console | None = None,
) -> list[Row]:
    """Find the largest batch, plain and rewritten, by bisection; print and return the rows.

    Every try is a process of its own that trains ``steps`` steps. A batch is too large when the
    device's memory runs out.

    Args:
        model: resnet50, unet3d or mlp.
        memory: device memory such as 300MB; by default the plain peak at ``plain_batch``.
        plain_batch: the plain batch that the default memory is made for.
        strategy: chain_rule, direct_order, or auto, whose limit and 3 % more are the memory.
        lb: of chain_rule and direct_order.
        branch_threshold: likewise; forward uses farther than this are swapped as well.
        image: edge of ResNet-50's images.
        size: edge of the U-Net's volumes.
        steps: training steps that must go well.
        resolution: the search ends when the interval is this share of the batch, or 1.
        console: where to print; by default standard output.

    Raises:
        ConfigError: the model is unknown.
    """
    console = console or Console()
    arguments = _arguments(model, image=image, size=size)
    say = _teller(console)

    def attempt(way: str, batch: int, memory_bytes: int) -> Outcome:
        config = None if way == "plain" else _config(way, memory_bytes, lb, branch_threshold, batch)
        job = Job(model, {**arguments, "batch": batch}, memory_bytes, steps, config=config)
        try:
            outcome = run_job(job)
        except TflmsError as error:
            if "InfeasibleError" not in str(error):
                raise
            outcome = Outcome(out_of_memory="the planner refuses the limit")
        say(f"{way}, batch {batch}: {'trains' if outcome.fits else 'too large'}")
        return outcome

    if memory is None:
        free = attempt("plain", plain_batch, _UNLIMITED)
        # Sizes are whole; fragmentation of the small memory takes its share of two percent.
        memory_bytes = int(max(free.trainings[0].peak_bytes) * 1.02)
    else:
        memory_bytes = parse_bytes(memory)
    rows: list[Row] = []
    for way in ("plain", strategy):
        start = plain_batch if way == "plain" else 2 * max(rows[0].batch, 1)
        found = largest(lambda batch, way=way: attempt(way, batch, memory_bytes), start, resolution)  # type: ignore[misc]
        batch, best, failed, failure = found
        plain = rows[0].batch if rows else batch
        rows.append(
            Row(
                model=model,
                memory_bytes=memory_bytes,
                way=way,
                batch=batch,
                failed_batch=failed,
                failure=failure,
                peak_bytes=0 if best is None else max(best.trainings[0].peak_bytes),
                step_seconds=0.0 if best is None else best.trainings[0].seconds[-1],
                times_plain=batch / plain if plain else 0.0,
                goal=_goal(model, way),
            )
        )
    _print(rows, console)
    return rows


def largest(
    attempt: Callable[[int], Outcome], start: int, resolution: float
) -> tuple[int, Outcome | None, int, str]:
    """Return the largest batch that fits, how it went, the smallest that failed, and its failure.

    Doubles or halves from ``start`` until both kinds are known, then bisects; that a smaller batch
    needs no more memory than a larger one is taken for granted.
    """
    good, best, bad, failure = 0, None, 0, ""
    batch = start
    while True:
        outcome = attempt(batch)
        if outcome.fits:
            good, best = batch, outcome
        else:
            bad, failure = batch, outcome.out_of_memory or ""
        if not bad:
            batch = 2 * good
        elif bad - good <= max(1, int(resolution * good)):
            return good, best, bad, failure
        else:
            batch = (good + bad) // 2


def _arguments(model: str, *, image: int, size: int) -> dict[str, Any]:
    known: dict[str, dict[str, Any]] = {
        "resnet50": {"image": image},
        "unet3d": {"size": size, "normalize": True, "optimizer_name": "sgd"},
        "mlp": {},
    }
    if model not in known:
        raise ConfigError(f"no model {model!r}; write one of {', '.join(known)}")
    return known[model]


def _config(way: str, memory_bytes: int, lb: int, threshold: int, batch: int) -> dict[str, Any]:
    config: dict[str, Any] = {"strategy": way, "batch_size": batch}
    if way in ("chain_rule", "direct_order"):
        config |= {"lb": lb, "swap_branches": True, "branch_threshold": threshold}
    else:
        config["memory_limit"] = memory_bytes * 100 // 103
    return config


def _goal(model: str, way: str) -> float | None:
    if way == "plain":
        return None
    return (AUTO_GOALS if way == "auto" else GOALS).get(model)


def _teller(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, style="dim", highlight=False)


def _print(rows: list[Row], console: Console) -> None:
    table = Table(title=f"{rows[0].model} in {format_bytes(rows[0].memory_bytes)}")
    for heading in ("", "largest batch", "times plain", "peak", "a step", "fails at", "met"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(
            row.way,
            str(row.batch),
            f"{row.times_plain:.2f}",
            format_bytes(row.peak_bytes),
            f"{row.step_seconds:.2f} s",
            str(row.failed_batch),
            "" if row.goal is None else "yes" if row.met else f"NO, {row.goal:.1f} is meant",
        )
    console.print(table)
