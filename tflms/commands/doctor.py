"""``python -m tflms doctor``: looks whether this installation has what the package needs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tflms import installed
from tflms.errors import TflmsError
from tflms.rewriting import ruleset

_BUILD_SECONDS = 600
_PRIVATE = ("_update_input", "_add_control_input", "_set_attr")  # of tf.Operation
_TRY_DEVICE = """
from tflms import emulator
emulator.load("64MB")
import tensorflow as tf
with tf.device(emulator.device):
    total = float(tf.reduce_sum(tf.random.stateless_uniform([1024], [0, 0]) + 1.0))
assert 1024 < total < 2048, total
assert emulator.stats().peak_bytes > 0
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it is.
        state: ``"fine"``, ``"missing"`` (something optional) or ``"wrong"``.
        told: what was found, and what to do where it is not fine.
    """

    subject: str
    state: str
    told: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--no-build", action="store_true", help="do not build and try the emulated accelerator"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if something is wrong."""
    findings = examine(build=not args.no_build)
    if args.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(f) for f in findings], indent=2) + "\n")
    else:
        colours = {"fine": "green", "missing": "yellow", "wrong": "red"}
        table = Table(show_header=False, box=None)
        for each in findings:
            state = f"[{colours[each.state]}]{each.state}[/]"
            table.add_row(f"[bold]{each.subject}[/]", state, each.told)
        Console().print(table)
    return 1 if any(each.state == "wrong" for each in findings) else 0


def examine(*, build: bool = True) -> list[Finding]:
    """Look at everything, and go on after what is wrong."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    checks: list[tuple[str, Callable[[], str]]] = [
        ("Python", _python),
        ("TensorFlow", _tensorflow),
        ("one TensorFlow", _flavours),
        ("private interfaces", _private_interfaces),
        ("devices", _devices),
        ("rules", _rules),
        ("compiler", _compiler),
        ("emulator cache", _cache),
    ]
    findings = [_find(subject, check) for subject, check in checks]
    if build and all(each.state == "fine" for each in findings):
        findings.append(_find("emulated accelerator", _device))
    for name, extra, use in (
        ("keras", "cpu", "Keras models"),
        ("nilearn", "examples", "the brain volume of demo and examples"),
        ("matplotlib", "plot", "pictures"),
    ):
        findings.append(_optional(name, extra, use))
    return findings


def _find(subject: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, "fine", check())
    except TflmsError as error:
        return Finding(subject, "wrong", str(error))
    except Exception as error:  # a broken installation fails in ways that nobody has listed
        return Finding(subject, "wrong", f"{type(error).__name__}: {error}")


def _python() -> str:
    version = ".".join(str(number) for number in sys.version_info[:3])
    return f"{version}, {sys.executable}"


def _tensorflow() -> str:
    installed.require_tensorflow()
    import tensorflow as tf

    found = installed.tensorflow_version()
    flavour = found[0] if found else "tensorflow"
    built = "with CUDA" if tf.test.is_built_with_cuda() else "without CUDA"
    return f"{tf.__version__} ({flavour}, built {built})"


def _flavours() -> str:
    here = []
    for name in installed.DISTRIBUTIONS:
        try:
            here.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(here) > 1:
        raise TflmsError(
            f"{' and '.join(here)} hold the same modules and overwrite each other; uninstall all "
            "of them and install the one that you want"
        )
    return here[0] if here else "a build that no package manager knows"


def _private_interfaces() -> str:
    import tensorflow as tf
    from tensorflow.python.eager.polymorphic_function import transform
    from tensorflow.python.grappler import tf_optimizer

    lacking = [f"tf.Operation.{name}" for name in _PRIVATE if not hasattr(tf.Operation, name)]
    if not isinstance(getattr(transform, "FUNC_GRAPH_TRANSFORMS", None), list):
        lacking.append("transform.FUNC_GRAPH_TRANSFORMS")
    if not hasattr(tf_optimizer, "OptimizeGraph"):
        lacking.append("tf_optimizer.OptimizeGraph")
    if lacking:
        raise TflmsError(
            f"this TensorFlow lacks {', '.join(lacking)}, which the hand-back needs; install "
            "TensorFlow 2.21"
        )
    return "as in TensorFlow 2.21: edits of a graph in place, function transforms, Grappler"


def _devices() -> str:
    import tensorflow as tf

    return ", ".join(device.name for device in tf.config.list_physical_devices())


def _rules() -> str:
    return f"{len(ruleset.load_all())} in {ruleset.rules_directory()}"


def _compiler() -> str:
    from tflms.emulator import build

    path = build.compiler()
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return told.stdout.partition("\n")[0] or path


def _cache() -> str:
    from tflms.emulator import build

    library = build.cached_library()
    if library.exists():
        return f"built: {library}"
    place = next(folder for folder in library.parents if folder.exists())
    if not os.access(place, os.W_OK):
        raise TflmsError(f"{place} cannot be written; set XDG_CACHE_HOME to a folder that can")
    return f"not built yet, will go to {library.parent}"


def _device() -> str:
    """Use the device in a process of its own: it is loaded once per process."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _TRY_DEVICE],
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if done.returncode != 0:
        lines: list[Any] = done.stderr.strip().splitlines()
        raise TflmsError(f"it cannot be used: {lines[-1] if lines else done.returncode}")
    return "loads, computes and counts its memory"


def _optional(name: str, extra: str, use: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "missing", f"needed for {use}; run: pip install 'tflms[{extra}]'")
    return Finding(name, "fine", f"{importlib.metadata.version(name)}, for {use}")
