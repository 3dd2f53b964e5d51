"""Makes command-line options out of the fields of ``Config`` and the parameters of functions."""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tflms.config import STRATEGIES, Config
from tflms.errors import ConfigError
from tflms.units import parse_bytes

_SCALARS = (int, float, str, Path)
_SEQUENCES = (tuple, list, collections.abc.Sequence)


def add_config_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add an option for every field of ``Config`` (``--n-tensors``, ``--no-fuse-swapins`` ...).

    Args:
        parser: what they are added to.
        defaults: settings that hold where neither an option nor the file of ``--config`` says
            otherwise.
    """
    group = parser.add_argument_group(
        "rewrite", "fields of tflms.Config; docs/reference/config.md explains each"
    )
    group.add_argument("--config", metavar="FILE", type=Path, help="TOML or JSON file of settings")
    hints = typing.get_type_hints(Config)
    for entry in dataclasses.fields(Config):
        default = defaults.get(entry.name, entry.default)
        shown = " ".join(default) if isinstance(default, tuple) else default
        _add(group, entry.name, hints[entry.name], help_text=f"default: {shown!r}")
    parser.set_defaults(config_defaults=defaults)


def config_of(args: argparse.Namespace) -> Config:
    """Return the settings that a command line asks for.

    Raises:
        ConfigError: a setting is not allowed.
    """
    settings = dict(args.config_defaults)
    if args.config is not None:
        given = Config.from_file(args.config)  # its defaults are not said in the file
        settings |= {
            entry.name: getattr(given, entry.name)
            for entry in dataclasses.fields(Config)
            if getattr(given, entry.name) != entry.default
        }
    for entry in dataclasses.fields(Config):
        if hasattr(args, entry.name):
            settings[entry.name] = getattr(args, entry.name)
    return Config.from_dict(settings)


def add_function_options(
    parser: argparse.ArgumentParser, function: Callable[..., Any], *, leave_out: tuple[str, ...]
) -> None:
    """Add an option for every parameter of a function, with the help of its docstring."""
    hints = typing.get_type_hints(function)
    helps = argument_helps(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in leave_out:
            continue
        needed = parameter.default is inspect.Parameter.empty
        told = helps.get(name, "")
        if not needed:
            told = f"{told} (default: {parameter.default!r})".strip()
        _add(parser, name, hints.get(name, str), help_text=told, required=needed)


def values_of(args: argparse.Namespace, function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the keyword arguments for a function that a command line gives."""
    names = inspect.signature(function).parameters
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def argument_helps(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a Google docstring's ``Args`` say, by parameter."""
    text = inspect.getdoc(function) or ""
    _, _, rest = text.partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", rest, maxsplit=1)[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(words.split()).rstrip(".") for name, words in found}


def size(text: str) -> int:
    """Return the bytes of a text such as ``120MB``; for ``type=`` of an option."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add(parser: Any, name: str, hint: Any, *, help_text: str, required: bool = False) -> None:
    """Add one option; it leaves no trace in the namespace unless it is given."""
    flag = "--" + name.replace("_", "-")
    help_text = help_text.replace("%", "%%")
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text}
    kinds = _kinds(hint)
    if kinds == [bool]:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        return
    common["required"] = required
    many = [kind for kind in kinds if typing.get_origin(kind) in _SEQUENCES]
    if many:
        item = typing.get_args(many[0])[0]
        common |= {"nargs": "*", "type": item if item in _SCALARS else str}
    elif name == "strategy" and str in kinds:
        common |= {"choices": STRATEGIES, "metavar": "NAME"}
        common["help"] = f"one of {', '.join(STRATEGIES)} ({help_text})"
    else:
        common["type"] = kinds[0] if len(kinds) == 1 and kinds[0] in _SCALARS else _number_or_text
    common.setdefault("metavar", "X")
    parser.add_argument(flag, **common)


def _kinds(hint: Any) -> list[Any]:
    """Return the alternatives of a type, None left out."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return [hint]


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
