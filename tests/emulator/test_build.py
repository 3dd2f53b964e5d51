"""Building the library: once for all processes, and with clear words when it cannot be built."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.emulated import run_on_emulator
from tflms.emulator import build
from tflms.emulator.native import NativeDevice
from tflms.errors import EmulatorError

# A compiler that counts its runs, and obeys what a test tells it in the environment.
_WRAPPER = """#!/bin/sh
echo run >> "$TEST_FOLDER/runs"
for word in "$@"; do
  case "$word" in
    -DTFLMS_TENSORFLOW_VERSION=*) [ -z "$TEST_VERSION" ] || word="$TEST_VERSION" ;;
    -D_GLIBCXX_USE_CXX11_ABI=*) [ -z "$TEST_ABI" ] || word="$TEST_ABI" ;;
  esac
  set -- "$@" "$word"; shift
done
exec g++ "$@" -O0
"""

_LOAD = """
from tflms.emulator.build import cached_library
emulator.load("20MB")
result = {"library": str(cached_library()), "sum": float(tf.reduce_sum(tf.ones([5])))}
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiler") / "wrapped-g++"
    path.write_text(_WRAPPER)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_two_processes_build_once_and_a_damaged_library_is_built_again(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler.parent / "runs"
    settings = {
        "XDG_CACHE_HOME": str(tmp_path),
        "CXX": str(compiler),
        "TEST_FOLDER": str(compiler.parent),
    }

    def load(_: int) -> Any:
        return run_on_emulator(_LOAD, memory_bytes=None, environment=settings)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(load, range(2)))
    assert [answer["sum"] for answer in both] == [5.0, 5.0]
    assert runs.read_text().split() == ["run"]

    library = Path(both[0]["library"])
    assert library.is_relative_to(tmp_path / "tflms")
    kept = sorted(path.name for path in library.parent.iterdir())
    assert kept == [library.with_suffix(".sha256").name, library.name, "lock"]

    whole = library.read_bytes()
    library.write_bytes(whole[:10_000])  # a disk that was full
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert build.built_library() == library
    assert runs.read_text().split() == ["run", "run"]
    assert library.stat().st_size == len(whole)
    assert build.built_library() == library
    assert runs.read_text().split() == ["run", "run"]


def open_with(
    compiler: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, **environment: str
) -> str:
    """Build and open the library in this process without starting it; return the error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TEST_FOLDER", str(compiler.parent))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EmulatorError) as caught:
        NativeDevice()
    return str(caught.value)


def test_a_library_for_another_tensorflow_is_refused(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = '-DTFLMS_TENSORFLOW_VERSION="2.20.0"'
    message = open_with(compiler, tmp_path, monkeypatch, TEST_VERSION=version)
    assert "was built for TensorFlow 2.20.0" in message
    assert "delete that file" in message


def test_a_library_with_another_abi_is_refused(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "-D_GLIBCXX_USE_CXX11_ABI=0"
    message = open_with(compiler, tmp_path, monkeypatch, TEST_ABI=flag)
    assert "undefined symbol" in message
    assert "install g++ (GCC 9 or newer)" in message


def test_without_a_compiler_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EmulatorError, match=r"apt-get install g\+\+"):
        build.built_library()


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such header >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(EmulatorError, match=r"(?s)no such header.*C\+\+17 compiler"):
        build.built_library()
    assert [path.name for path in build.cached_library().parent.iterdir()] == ["lock"]


def test_a_tensorflow_that_the_source_is_not_written_for_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "SUPPORTED_TENSORFLOW", ("1.15",))
    with pytest.raises(EmulatorError, match=r"install tensorflow==1\.15\.\*"):
        build.built_library()


def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(EmulatorError, match="set XDG_CACHE_HOME"):
        build.built_library()


def test_a_change_of_the_source_leads_to_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.cached_library()
    monkeypatch.setattr(build, "_OPTIONS", (*build._OPTIONS, "-O3"))
    assert build.cached_library() != before
    assert build.cached_library().name == before.name


def test_a_relative_cache_home_is_ignored_as_its_standard_demands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join("some", "where"))
    assert build.cached_library().is_relative_to(Path.home() / ".cache" / "tflms")
