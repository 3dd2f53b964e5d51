"""``python -m tflms demo``: a 3D U-Net that runs out of device memory, and trains once rewritten.

Every configuration runs on the emulated accelerator in a process of its own, and every claim is
checked: the exit status is 0 only if all of them hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tflms.commands.children import run_job
from tflms.commands.job import Job, Outcome, Training
from tflms.commands.options import size
from tflms.config import STRATEGIES
from tflms.errors import ConfigError
from tflms.units import format_bytes, format_seconds

HELP = "watch a 3D U-Net run out of device memory, and train once it is rewritten"
DIALS = {"swap_branches": True, "branch_threshold": 8}  # the skip connections wait longest
_LARGE = 16  # times the limit: memory in which the un-rewritten graph is the reference
_LEARNING_RATE = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One configuration of the demo.

    Attributes:
        name: what the table calls it.
        job: what is trained.
        outcome: what became of it.
        problems: claims that do not hold.
    """

    name: str
    job: Job
    outcome: Outcome
    problems: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    rewriting = [name for name in STRATEGIES if name != "none"]
    parser.add_argument("--size", type=int, default=64, help="voxels per edge (default: 64)")
    parser.add_argument("--limit", type=size, metavar="BYTES",
                        help="device memory, such as 120MB (default: by the size)")  # fmt: skip
    parser.add_argument("--strategy", action="append", choices=rewriting, metavar="NAME",
                        help="rewrite by this strategy; repeat for several "
                        "(default: chain_rule and direct_order)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=6, help="training steps (default: 6)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")


def run(args: argparse.Namespace) -> int:
    """Show the demo; return 0 if everything is as claimed, else 1."""
    if args.steps < 2:
        raise ConfigError(f"--steps is {args.steps}; the demo needs 2 or more")
    if args.size < 16 or args.size % 8:
        raise ConfigError(f"--size is {args.size}; use a multiple of 8 from 16 on")
    limit = args.limit or limit_of(args.size)
    console = Console()
    console.print(
        f"A 3D U-Net labels the tissues of a brain, {args.size}x{args.size}x{args.size} voxels at "
        f"a time, on an emulated accelerator with [bold]{format_bytes(limit)}[/] of memory."
    )
    strategies = args.strategy or ["chain_rule", "direct_order"]
    runs = train_all(jobs_of(args.size, limit, args.steps, strategies), console)
    show(runs, limit, console)
    if args.json is not None:
        text = json.dumps(to_dict(runs, limit), indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 1 if any(each.problems for each in runs) else 0


def limit_of(edge: int) -> int:
    """Return a memory between what the rewritten and what the plain network of a size need."""
    weights, per_voxel = 5_700_000, 110_300_000 / 64**3
    return int(round(weights + per_voxel * edge**3, -5))


def jobs_of(edge: int, limit: int, steps: int, strategies: list[str]) -> dict[str, Job]:
    """Return what is trained, by name: the plain graph in both memories, then the rewritten ones.

    The reference is trained twice, to show that it repeats itself exactly.
    """
    plain = Job(
        model="unet3d",
        arguments={"size": edge, "optimizer_name": "sgd", "learning_rate": _LEARNING_RATE},
        memory_bytes=limit,
        steps=steps,
        brain_size=min(192, edge * 3 // 2),
    )
    large = dataclasses.replace(plain, memory_bytes=max(_LARGE * limit, 2**30), sessions=2)
    jobs = {"plain": plain, "plain, large": large}
    for strategy in dict.fromkeys(strategies):
        config: dict[str, Any] = {"strategy": strategy}
        if strategy in ("chain_rule", "direct_order"):
            config |= DIALS
        else:  # these plan for a limit
            config["memory_limit"] = limit
        jobs[strategy] = dataclasses.replace(plain, config=config, verify=True)
    return jobs


def train_all(jobs: dict[str, Job], console: Console) -> list[Run]:
    """Train every job and check what is claimed of it."""
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn())
    runs: list[Run] = []
    reference: Outcome | None = None
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        total = sum(1 + job.steps * job.sessions for job in jobs.values())
        task = progress.add_task("", total=total)
        done = 0
        for name, job in jobs.items():
            progress.update(task, description=name)
            outcome = run_job(job, on_event=lambda event: progress.advance(task))
            done += 1 + job.steps * job.sessions
            progress.update(task, completed=done)
            if name == "plain":
                console.print(f"Plain: {outcome.out_of_memory or 'it fits'}", style="red")
            elif reference is None:
                reference = outcome
            runs.append(Run(name, job, outcome, problems_of(name, job, outcome, reference)))
    return runs


def problems_of(
    name: str, job: Job, outcome: Outcome, reference: Outcome | None
) -> tuple[str, ...]:
    """Return which claims a run does not keep.

    Args:
        name: the run's name.
        job: what was trained.
        outcome: what became of it.
        reference: the un-rewritten run in a large memory; None for the run that must not fit.
    """
    if reference is None:
        return () if not outcome.fits else (f"{name} fits in {format_bytes(job.memory_bytes)}",)
    if not outcome.fits or not outcome.trainings:
        return (f"{name} does not fit: {outcome.out_of_memory}",)
    if not reference.trainings:
        return (f"{name} has nothing to be compared with",)
    found = []
    wanted = reference.trainings[0]
    for training in outcome.trainings:
        if training.losses != wanted.losses:
            found.append(f"{name}: losses differ from the reference: {training.losses}")
        if training.variables != wanted.variables or not training.variables:
            found.append(f"{name}: variables differ from the reference")
        if max(training.peak_bytes) > job.memory_bytes:
            found.append(f"{name}: the peak is over the limit")
    if job.config is not None:
        for where, alive in (("optimised", outcome.before_run), ("first run's", outcome.in_run)):
            if alive is None or not alive.ok:
                found.append(f"{name}: inserted operations are missing in the {where} graph")
        if not sum(outcome.trainings[0].to_host_bytes) and not (outcome.report or {}).get(
            "recomputes"
        ):
            found.append(f"{name}: nothing was moved or recomputed")
    return tuple(found)


def show(runs: list[Run], limit: int, console: Console) -> None:
    """Print a table with a column per run, and what does not hold."""
    wanted = next((run.outcome.trainings[0] for run in runs if run.outcome.trainings), None)
    columns = [cells(each, wanted) for each in runs]
    table = Table(title=f"{runs[0].job.steps} steps", title_justify="left")
    for heading in ("", *(each.name for each in runs)):
        table.add_column(heading, justify="right" if heading else "left")
    for key in dict.fromkeys(key for column in columns for key in column):
        table.add_row(key, *(column.get(key, "") for column in columns))
    console.print(table)
    if wanted is not None:
        console.print("losses:", "  ".join(f"{loss:.6f}" for loss in wanted.losses))
    console.print(
        "Peaks, bytes moved (per step) and median seconds are measured; 'equal' means bit for bit; "
        "alive: inserted operations in the graphs that ran.",
        style="dim",
    )
    problems = [problem for each in runs for problem in each.problems]
    for problem in problems:
        console.print(f"not as claimed: {problem}", style="bold red", markup=False)
    if not problems:
        console.print(
            f"Plain needs more than {format_bytes(limit)}; rewritten it trains there, with the "
            "same numbers.",
            style="green",
        )


def cells(each: Run, wanted: Training | None) -> dict[str, str]:
    """Return a run's column of the table; ``wanted`` is what it must equal."""
    told = {"device memory": format_bytes(each.job.memory_bytes)}
    outcome = each.outcome
    if not outcome.fits or wanted is None:
        return {**told, "fits": "[red]no[/]"}
    got = figures(outcome)
    told |= {
        "fits": "[green]yes[/]",
        "peak": format_bytes(got["peak_bytes"]),
        "to host": format_bytes(got["to_host_bytes"]),
        "to device": format_bytes(got["to_device_bytes"]),
        "seconds per step": format_seconds(got["step_seconds"]),
        "losses": _equal(all(t.losses == wanted.losses for t in outcome.trainings)),
        "variables": _equal(all(t.variables == wanted.variables for t in outcome.trainings)),
    }
    if outcome.in_run is not None:
        told["alive"] = f"{outcome.in_run.survived} of {outcome.in_run.expected}"
    return told


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return a run's measured figures: highest peak, most bytes of a step, median seconds."""
    trainings = outcome.trainings
    return {
        "peak_bytes": max(peak for t in trainings for peak in t.peak_bytes),
        "to_host_bytes": max(nbytes for t in trainings for nbytes in t.to_host_bytes),
        "to_device_bytes": max(nbytes for t in trainings for nbytes in t.to_device_bytes),
        # The first step includes what TensorFlow does once.
        "step_seconds": statistics.median(s for t in trainings for s in t.seconds[1:]),
    }


def to_dict(runs: list[Run], limit: int) -> dict[str, Any]:
    """Return all figures as plain data."""
    return {
        "format": 1,
        "limit_bytes": limit,
        "as_claimed": not any(each.problems for each in runs),
        "runs": [
            {
                **dataclasses.asdict(each),
                "fits": each.outcome.fits,
                "measured": figures(each.outcome) if each.outcome.trainings else None,
            }
            for each in runs
        ],
    }


def _equal(same: bool) -> str:
    return "[green]equal[/]" if same else "[red]differ[/]"
