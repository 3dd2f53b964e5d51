"""Loads the formal rules from ``rules/*.toml`` and compiles their statements; no rule is code.

A rule's ``before`` and ``after`` are statements of these forms:

    v = f(...)                          v is some operation's output
    w = Identity(h) @host after anchor  a copy; ``@host`` and ``after`` where they are wanted
    c = Clone(f) after anchor           f's operation once more, reading what ``swapped`` maps
    late <- w                           the uses ``late`` read w
    w after new, not old                w waits for new and no longer for old
    b after a                           a control edge
    drop w                              an inserted operation goes
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tflms.errors import RuleError

KINDS = ("Value", "Uses", "Op", "Swaps")
_MAKE = re.compile(
    r"(?P<name>\w+) = (?P<type>\w+)\((?P<args>[\w., ]*)\)"
    r"(?: @(?P<place>\w+))?(?: after (?P<after>\w+))?"
)
_MOVE = re.compile(r"(?P<uses>\w+) <- (?P<value>\w+)")
_ORDER = re.compile(r"(?P<op>\w+) after (?P<after>\w+)(?:, not (?P<old>\w+))?")
_DROP = re.compile(r"drop (?P<op>\w+)")
_CALL = re.compile(r"(?P<name>\w+)\((?P<args>[\w, ]*)\)")
_GIVEN = re.compile(r"(?P<name>\w+): (?P<kind>\w+)(?:\((?P<of>\w+)\))?")
_KEYS = ("name", "title", "reference", "given", "before", "after", "requires", "ensures",
         "example", "refusal")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Statement:
    """One compiled line of ``before`` or ``after``; fields that its form lacks are empty."""

    form: str  # "make", "move", "order" or "drop"
    name: str  # what is made, moved, ordered or dropped
    source: str = ""  # what it is made of or reads
    type: str = ""
    host: bool = False
    after: str = ""
    instead_of: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One condition of ``requires`` or ``ensures`` with the names of its arguments."""

    name: str
    args: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.args)})"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rewrite rule: what it is given, what must hold, what it does, what it promises."""

    name: str
    title: str
    reference: str
    given: tuple[tuple[str, str], ...]  # metavariable and its kind
    before: tuple[Statement, ...]
    after: tuple[Statement, ...]
    requires: tuple[Call, ...]
    ensures: tuple[Call, ...]
    examples: tuple[dict[str, Any], ...]
    refusals: tuple[dict[str, Any], ...]
    text: str


def rules_directory() -> Path:
    """Return the folder of the rule files: in the installed package, else beside the checkout.

    Raises:
        RuleError: neither place has any.
    """
    package = Path(str(importlib.resources.files("tflms")))
    for folder in (package / "_rules", package.parent / "rules"):
        if any(folder.glob("*.toml")):
            return folder
    raise RuleError(
        f"no rule files in {package / '_rules'} nor in {package.parent / 'rules'}; "
        "install tflms again, or run from a complete checkout"
    )


@functools.cache
def load_all() -> dict[str, Rule]:
    """Load every rule file, by rule name, in the order of the names.

    Raises:
        RuleError: a file is malformed.
    """
    rules = [load(path) for path in sorted(rules_directory().glob("*.toml"))]
    return {rule.name: rule for rule in rules}


def load(path: Path) -> Rule:
    """Load one rule file.

    Raises:
        RuleError: it is malformed; the message names file and entry.
    """
    source = path.read_text(encoding="utf-8")
    try:
        data = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise RuleError(f"{path.name}: {error}") from None
    missing = [key for key in _KEYS if key not in data]
    unknown = [key for key in data if key not in _KEYS]
    if missing or unknown:
        raise RuleError(f"{path.name}: missing keys {missing}, unknown keys {unknown}")
    if data["name"] != path.stem:
        raise RuleError(f"{path.name} holds a rule called {data['name']!r}; they must agree")
    if not data["example"] or not data["refusal"]:
        raise RuleError(f"{path.name}: a rule needs at least one example and one refusal")
    return Rule(
        name=data["name"],
        title=data["title"],
        reference=data["reference"],
        given=tuple(_given(path, entry) for entry in data["given"]),
        before=tuple(_statement(path, entry) for entry in data["before"]),
        after=tuple(_statement(path, entry) for entry in data["after"]),
        requires=tuple(_call(path, entry) for entry in data["requires"]),
        ensures=tuple(_call(path, entry) for entry in data["ensures"]),
        examples=tuple(data["example"]),
        refusals=tuple(data["refusal"]),
        text=source,
    )


def _given(path: Path, entry: str) -> tuple[str, str]:
    match = _GIVEN.fullmatch(entry)
    if match is None or match.group("kind") not in KINDS:
        raise RuleError(f"{path.name}: cannot read {entry!r}; write `name: {'|'.join(KINDS)}`")
    return match.group("name"), match.group("kind")


def _statement(path: Path, entry: str) -> Statement:
    if match := _MAKE.fullmatch(entry):
        place = match.group("place")
        if place not in (None, "host"):
            raise RuleError(f"{path.name}: unknown place @{place} in {entry!r}")
        return Statement("make", match.group("name"), source=match.group("args"),
                         type=match.group("type"), host=place == "host",
                         after=match.group("after") or "")  # fmt: skip
    if match := _MOVE.fullmatch(entry):
        return Statement("move", match.group("uses"), source=match.group("value"))
    if match := _DROP.fullmatch(entry):
        return Statement("drop", match.group("op"))
    if match := _ORDER.fullmatch(entry):
        return Statement("order", match.group("op"), after=match.group("after"),
                         instead_of=match.group("old") or "")  # fmt: skip
    raise RuleError(f"{path.name}: cannot read the statement {entry!r}")


def _call(path: Path, entry: str) -> Call:
    match = _CALL.fullmatch(entry)
    if match is None:
        raise RuleError(f"{path.name}: cannot read the condition {entry!r}; write `name(args)`")
    return Call(match.group("name"), tuple(a.strip() for a in match.group("args").split(",") if a))
