"""Knows whether a TensorFlow that the package can work with is installed, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from tflms.errors import TflmsError

OLDEST_TENSORFLOW = (2, 21)
DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu")
"""Names under which TensorFlow is published; any of them will do."""

_ADVICE = (
    "run: pip install 'tflms[tensorflow]' for machines with a GPU, or pip install 'tflms[cpu]' for "
    "those without"
)


def tensorflow_version() -> tuple[str, str] | None:
    """Return the distribution that holds TensorFlow and its version, or None where there is none.

    A TensorFlow that no package manager knows (a build on the path) has the version ``"unknown"``.
    """
    if importlib.util.find_spec("tensorflow") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "tensorflow", "unknown"


def require_tensorflow() -> None:
    """Raise if TensorFlow cannot be imported or is too old; cheap, nothing is imported.

    Raises:
        TflmsError: the message says what to install.
    """
    found = tensorflow_version()
    if found is None:
        raise TflmsError(f"tflms rewrites TensorFlow graphs, and TensorFlow is missing; {_ADVICE}")
    name, version = found
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < OLDEST_TENSORFLOW:
        oldest = ".".join(str(number) for number in OLDEST_TENSORFLOW)
        raise TflmsError(f"tflms needs TensorFlow {oldest} or newer, and {name} {version} is here; "
                         f"{_ADVICE}")  # fmt: skip
