"""``python -m tflms rules``: lists the rewrite rules, or prints one with its examples."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from tflms.errors import RuleError
from tflms.rewriting import ruleset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", help="the rule to print (default: list them all)")
    parser.add_argument("--source", action="store_true", help="print the rule's file as it stands")


def run(args: argparse.Namespace) -> int:
    """Print the rules, or one of them."""
    rules = ruleset.load_all()
    console = Console()
    if args.name is None:
        table = Table("rule", "what it does", box=None)
        for rule in rules.values():
            table.add_row(f"[bold]{rule.name}[/]", rule.title)
        console.print(table)
        return 0
    if args.name not in rules:
        near = difflib.get_close_matches(args.name, rules, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RuleError(f"no rule {args.name!r}{hint} (known: {', '.join(rules)})")
    rule = rules[args.name]
    if args.source:
        console.print(Syntax(rule.text, "toml"))
        return 0
    console.print(f"[bold]{rule.name}[/]  {rule.title}")
    console.print(rule.reference, style="dim", markup=False)
    given = ", ".join(f"{name}: {kind}" for name, kind in rule.given)
    lines = {"given": [given], "before": _lines(rule, "before"), "after": _lines(rule, "after"),
             "requires": [str(call) for call in rule.requires],
             "ensures": [str(call) for call in rule.ensures]}  # fmt: skip
    table = Table(show_header=False, box=None)
    for key, entries in lines.items():
        table.add_row(f"[bold]{key}[/]", "\n".join(entries))
    console.print(table)
    for example in rule.examples:
        console.rule(f"example: {_bound(example)}")
        _show(console, "before", example["before"])
        if "after" in example:
            _show(console, "after", example["after"])
    for refusal in rule.refusals:
        console.rule(f"refused, {refusal['reason']!r}: {_bound(refusal)}")
        _show(console, "before", refusal["before"])
    return 0


def _lines(rule: ruleset.Rule, key: str) -> list[str]:
    """Return a rule's statements as its file has them."""
    return list(tomllib.loads(rule.text)[key])


def _bound(case: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in case["bind"].items())


def _show(console: Console, title: str, text: str) -> None:
    console.print(title, style="bold")
    console.print(text.strip("\n"), markup=False, highlight=False, soft_wrap=True)
