"""``python -m tflms report``: prints a saved report, or what it says about one operation."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms.errors import ConfigError
from tflms.report import FORMAT, Recompute, Report, Survival, Swap
from tflms.rewriting.engine import Refusal
from tflms.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, help="what report.save() wrote")
    parser.add_argument(
        "--why", metavar="NAME", help="what was decided about an operation, and why"
    )
    parser.add_argument("--swaps", action="store_true", help="list the values that move")
    parser.add_argument("--refusals", action="store_true", help="list refused rule applications")


def run(args: argparse.Namespace) -> int:
    """Print what was asked for."""
    report = load(args.file)
    console = Console()
    if args.why is not None:
        console.print(report.why(args.why), markup=False, soft_wrap=True)
        return 0
    console.print(report)
    if args.swaps:
        table = Table("value", "bytes", "leaves after", "comes back at", "read by")
        for swap in report.swaps:
            size = "" if swap.nbytes is None else format_bytes(swap.nbytes)
            levels = (f"level {swap.gone_level}", f"level {swap.back_level}")
            table.add_row(swap.value, size, *levels, "\n".join(swap.uses))
        console.print(table)
    if args.refusals:
        table = Table("rule", "reason", "culprits")
        for refusal in report.refusals:
            table.add_row(refusal.rule, refusal.reason, "\n".join(refusal.culprits))
        console.print(table)
    return 0


def load(path: Path) -> Report:
    """Read a report that ``Report.save`` wrote.

    Raises:
        ConfigError: the file cannot be read, or is no report of this format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the report {str(path)!r}: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"{str(path)!r} is no report of format {FORMAT}; write it anew")
    try:
        for key, kind in (("swaps", Swap), ("recomputes", Recompute), ("refusals", Refusal)):
            data[key] = tuple(_record(kind, entry) for entry in data[key])
        if data["survival"] is not None:
            data["survival"] = _record(Survival, data["survival"])
        for key in ("unknown_ops", "notes", "inserted_names"):
            data[key] = tuple(data[key])
        return _record(Report, {key: value for key, value in data.items() if key != "format"})
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} is no complete report: {error}") from None


def _record(kind: Any, entry: dict[str, Any]) -> Any:
    """Build a dataclass from plain data, in which tuples have become lists."""
    names = {each.name for each in dataclasses.fields(kind) if each.init}
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    unknown = sorted(set(values) - names)
    if unknown:
        raise TypeError(f"unknown keys {unknown}")
    return kind(**values)
