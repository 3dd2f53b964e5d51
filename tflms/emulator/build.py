"""Builds the device's C++ source against the installed TensorFlow, once, and keeps the result."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from tflms.errors import EmulatorError

_log = logging.getLogger(__name__)

SUPPORTED_TENSORFLOW = ("2.21",)
"""TensorFlow versions (major.minor) whose internal interfaces the C++ source is written for."""

_SOURCES = ("device.cc", "kernels.h", "link.h", "memory.h")
_OPTIONS = ("-O2", "-w", "-DNDEBUG", "-fPIC", "-shared")
_LIBRARY = "libtflms_emulator.so"
_BUILD_SECONDS = 600


def cached_library() -> Path:
    """Return where the library for this TensorFlow and this source is kept, built or not.

    Raises:
        EmulatorError: the platform or the TensorFlow version is not supported.
    """
    return _cache_folder() / f"{tf.__version__}-{_fingerprint()}" / _LIBRARY


def built_library() -> Path:
    """Return the path of the library, building it where the cache lacks it or holds a damaged one.

    Two processes that build at once take turns; the second finds what the first has built.

    Raises:
        EmulatorError: it cannot be built; the message says what to install.
    """
    library = cached_library()
    if _is_intact(library):
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EmulatorError(
            f"cannot keep the emulated accelerator in {library.parent}: {error.strerror}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    with _locked(library.parent / "lock"):
        if not _is_intact(library):
            _build(library)
    return library


def compiler() -> str:
    """Return the C++ compiler: ``$CXX`` where it is set, else g++.

    Raises:
        EmulatorError: there is none.
    """
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        raise EmulatorError(
            f"no C++ compiler: {wanted} is not on the PATH, and the emulated accelerator is built "
            "on first use; install g++ (Debian, Ubuntu: apt-get install g++; Fedora: dnf install "
            "gcc-c++), or name another compiler in the environment variable CXX"
        )
    return found


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    base = Path(root) if root and os.path.isabs(root) else Path.home() / ".cache"
    return base / "tflms" / "emulator"


def _fingerprint() -> str:
    """Hash what the library depends on: source, TensorFlow, its flags, the kind of machine."""
    _check_platform()
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(_source(name).read_bytes())
    for text in (tf.version.GIT_VERSION, platform.machine(), *_OPTIONS, *_tensorflow_flags()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _source(name: str) -> Path:
    path = Path(__file__).with_name(name)
    if not path.exists():
        raise EmulatorError(f"the installed package lacks {path}; reinstall tflms")
    return path


def _check_platform() -> None:
    if sys.platform != "linux":
        raise EmulatorError(f"the emulated accelerator runs on Linux only, not on {sys.platform}")
    version = ".".join(tf.__version__.split(".")[:2])
    if version not in SUPPORTED_TENSORFLOW:
        known = ", ".join(SUPPORTED_TENSORFLOW)
        raise EmulatorError(
            f"the emulated accelerator is written for TensorFlow {known} and TensorFlow "
            f"{tf.__version__} is installed; install tensorflow=={SUPPORTED_TENSORFLOW[-1]}.* "
            f"(or tensorflow-cpu of that version)"
        )


def _tensorflow_flags() -> list[str]:
    return [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_intact(library: Path) -> bool:
    """Tell whether the library is there and whole: opening a truncated one kills the process."""
    try:
        wanted = _checksum_file(library).read_text()
        return hashlib.sha256(library.read_bytes()).hexdigest() == wanted
    except OSError:
        return False


def _build(library: Path) -> None:
    """Compile into a file of its own and move it into place, so that nobody sees half a library."""
    include = Path(tf.sysconfig.get_include())
    if not (include / "tensorflow/core/framework/op_kernel.h").exists():
        raise EmulatorError(
            f"TensorFlow's C++ headers are missing under {include}; install TensorFlow from its "
            "wheel: pip install --force-reinstall tensorflow-cpu (or tensorflow)"
        )
    _log.info("building the emulated accelerator for TensorFlow %s", tf.__version__)
    descriptor, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(descriptor)
    command = [
        compiler(),
        *_OPTIONS,
        f'-DTFLMS_TENSORFLOW_VERSION="{tf.__version__}"',
        str(_source("device.cc")),
        *_tensorflow_flags(),
        "-o",
        unfinished,
    ]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
        )
        if result.returncode != 0:
            raise EmulatorError(
                f"building the emulated accelerator failed:\n{result.stderr[-4000:]}\n"
                f"with: {' '.join(command)}\nIt needs a C++17 compiler and TensorFlow "
                f"{', '.join(SUPPORTED_TENSORFLOW)} installed from its wheel."
            )
        os.chmod(unfinished, 0o755)
        checksum = hashlib.sha256(Path(unfinished).read_bytes()).hexdigest()
        _checksum_file(library).write_text(checksum)
        os.replace(unfinished, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmulatorError(f"building the emulated accelerator failed: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        lock = path.open("w")
    except OSError as error:
        raise EmulatorError(
            f"cannot write {path}: {error.strerror}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file releases the lock
