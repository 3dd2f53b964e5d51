"""``python -m tflms rewrite``: rewrites a saved training graph and saves it again."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from tflms.commands import saved
from tflms.commands.options import config_of
from tflms.installed import require_tensorflow
from tflms.planning.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    saved.add_graph_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="where the rewritten graph goes, in the kind of the input",
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="do what this plan says, instead of deciding anew"
    )


def run(args: argparse.Namespace) -> int:
    """Rewrite, check that the rewrite survives TensorFlow's optimizers, save, and print it.

    Returns 0, or 1 where nothing was changed or an inserted operation does not survive.
    """
    require_tensorflow()
    from tflms.runtime.rewrite import rewrite

    console = Console()
    config = config_of(args)
    graph, is_meta = saved.load(args.graph)
    if args.plan is not None:
        report = rewrite(graph, plan=Plan.load(args.plan))
    else:
        report = rewrite(graph, config, loss=args.loss, fetches=args.fetches)
    with saved.step_marked(graph, [args.loss, *args.fetches]):
        alive = not report.changed or report.verify().ok
    saved.save(graph, args.output, is_meta=is_meta)
    console.print(report)
    if args.save_report is not None:
        report.save(args.save_report)
    return 0 if report.changed and alive else 1
