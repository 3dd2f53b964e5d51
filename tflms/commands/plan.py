"""``python -m tflms plan``: decides how a saved graph would be rewritten, and changes nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tflms.commands import saved
from tflms.commands.options import config_of
from tflms.installed import require_tensorflow
from tflms.planning.plan import Plan
from tflms.units import format_bytes, format_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    saved.add_graph_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the plan, for `python -m tflms rewrite --plan`",
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print; with ``--save-report``, also rewrite a copy in memory for its report."""
    require_tensorflow()
    from tflms.runtime.plan_api import plan
    from tflms.runtime.rewrite import rewrite

    config = config_of(args)
    graph, _ = saved.load(args.graph)
    decided = plan(graph, config, loss=args.loss, fetches=args.fetches)
    Console().print(table_of(decided))
    if args.output is not None:
        decided.save(args.output)
    if args.save_report is not None:
        rewrite(graph, plan=decided).save(args.save_report)
    return 0


def table_of(plan: Plan) -> Table:
    """Return a plan's figures, all of them predictions, as a table."""
    table = Table(title="plan (all figures are predictions)", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    rules: dict[str, int] = {}
    for rule, _ in plan.steps:
        rules[rule] = rules.get(rule, 0) + 1
    table.add_row("strategy", str(plan.config["strategy"]))
    table.add_row("rules", ", ".join(f"{name} {count}" for name, count in sorted(rules.items())))
    table.add_row(
        "peak",
        f"{format_bytes(plan.plain_peak_bytes)} before, "
        f"{format_bytes(plan.predicted_peak_bytes)} after",
    )
    table.add_row(
        "step",
        f"{format_seconds(plan.plain_seconds)} before, "
        f"{format_seconds(plan.predicted_seconds)} after",
    )
    if plan.floor_bytes is not None:
        table.add_row("floor", format_bytes(plan.floor_bytes))
    table.add_row("parked at once", format_bytes(plan.host_bytes))
    table.add_row("moved per step", f"{format_bytes(plan.moved_bytes)} to the host")
    for note in plan.notes:
        table.add_row("note", note)
    return table
