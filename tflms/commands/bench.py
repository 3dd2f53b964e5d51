"""``python -m tflms bench NAME``: finds the bench's module and makes options of its parameters.

A bench is a module ``tflms.commands.bench_<name>`` with a function ``run``. Its parameters become
options; it prints its own table and returns rows (dataclasses). A row whose ``met`` is False makes
the exit status 1.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tflms.commands.options import add_function_options, values_of
from tflms.errors import ConfigError

_FOLDER = Path(__file__).parent
_NOT_OPTIONS = ("console",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    told = "; ".join(f"{name}: {what}" for name, what in benches().items())
    parser.add_argument("name", nargs="?", help=f"which bench. {told}".replace("%", "%%"))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...",
                        help="its options; NAME --help lists them")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run a bench; return 1 if a row says that it did not meet its goal."""
    known = benches()
    if args.name is None:
        for name, what in known.items():
            sys.stdout.write(f"{name:16} {what}\n")
        return 0
    if args.name not in known:
        raise ConfigError(f"no bench {args.name!r} (known: {', '.join(known)})")
    module = importlib.import_module(f"tflms.commands.bench_{args.name.replace('-', '_')}")
    parser = argparse.ArgumentParser(
        prog=f"python -m tflms bench {args.name}", description=known[args.name]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")
    add_function_options(parser, module.run, leave_out=_NOT_OPTIONS)
    asked = parser.parse_args(args.rest)
    rows = module.run(**values_of(asked, module.run))
    rows = [] if rows is None else list(rows) if isinstance(rows, list | tuple) else [rows]
    if asked.json is not None:
        plain = json.dumps([_plain(row) for row in rows], indent=2, default=str)
        asked.json.write_text(plain + "\n", encoding="utf-8")
    return 1 if any(getattr(row, "met", True) is False for row in rows) else 0


def benches() -> dict[str, str]:
    """Return the benches that are there and what each measures; none of them is imported."""
    found = {}
    for path in sorted(_FOLDER.glob("bench_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            continue  # a helper of a bench
        words = (ast.get_docstring(tree) or "").partition("\n")[0]
        name = path.stem.removeprefix("bench_").replace("_", "-")
        found[name] = words.rpartition("``: ")[2].rstrip(".")
    return found


def _plain(row: Any) -> Any:
    return dataclasses.asdict(row) if dataclasses.is_dataclass(row) else row  # type: ignore[arg-type]
