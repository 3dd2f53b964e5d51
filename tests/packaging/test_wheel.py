"""The package as users get it: a wheel, an editable install and a bare checkout, used elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import site
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

import tflms

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tflms", "rules")
INSTALL_SECONDS = 300

LOOK = """
    import importlib.resources, json, sys, tomllib
    from pathlib import Path
    import tflms
    from tflms.rewriting import ruleset

    package = importlib.resources.files("tflms")
    folder = ruleset.rules_directory()
    emulator = package / "emulator"
    print(json.dumps({
        "package": str(Path(tflms.__file__).resolve().parent),
        "rules_folder": str(folder.resolve()),
        "rules": {p.name: tomllib.loads(p.read_text())["name"] for p in folder.glob("*.toml")},
        "loaded": sorted(ruleset.load_all()),
        "sources": {p.name: p.read_text() for p in emulator.iterdir() if p.suffix in (".cc", ".h")},
        "typed": (package / "py.typed").is_file(),
        "in_package": (package / "_rules").is_dir(),
        "tensorflow": "tensorflow" in sys.modules,
    }))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what the package is built from: builds leave their traces there, not here."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", *isolation(), "--wheel-dir", str(folder), str(checkout))
    (path,) = folder.glob("*.whl")
    return path


def isolation() -> list[str]:
    """Build with the setuptools that is here, if any; else let pip fetch one."""
    builders = ("setuptools", "wheel")
    here = all(importlib.util.find_spec(name) for name in builders)
    return ["--no-build-isolation"] if here else []


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def environment(folder: Path) -> Path:
    """Make an environment that has this one's libraries but not its tflms; return its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # Lines of a .pth file extend the path; .pth files found there (an editable tflms) do not count.
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def use(python: Path, folder: Path, *, path: str = "") -> dict:
    """Look at the package from a folder that has nothing to do with the checkout."""
    folder.mkdir()
    done = subprocess.run(
        [str(python), "-P", "-c", textwrap.dedent(LOOK)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(seen: dict, checkout: Path, *, package: Path, rules: Path) -> None:
    """Compare what a run has seen to the checkout that it was made from."""
    assert Path(seen["package"]) == package.resolve()
    assert Path(seen["rules_folder"]) == rules.resolve()
    files = {path.name: path.stem for path in (checkout / "rules").glob("*.toml")}
    assert files and seen["rules"] == files
    assert seen["loaded"] == sorted(files.values())
    emulator = checkout / "tflms/emulator"
    sources = [*emulator.glob("*.cc"), *emulator.glob("*.h")]
    assert sources and seen["sources"] == {path.name: path.read_text() for path in sources}
    assert seen["typed"]
    assert not seen["tensorflow"]


def test_a_wheel_has_everything_and_works_elsewhere(wheel, checkout, tmp_path):
    python = environment(tmp_path / "environment")
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    seen = use(python, tmp_path / "elsewhere")
    check(seen, checkout, package=packages / "tflms", rules=packages / "tflms/_rules")
    assert seen["in_package"]


def test_an_editable_install_reads_the_checkout(checkout, tmp_path):
    python = environment(tmp_path / "environment")
    pip("--python", str(python), "install", "--no-deps", *isolation(), "--editable", str(checkout))
    seen = use(python, tmp_path / "elsewhere")
    check(seen, checkout, package=checkout / "tflms", rules=checkout / "rules")


def test_a_bare_checkout_needs_no_install(checkout, tmp_path):
    python = environment(tmp_path / "environment")
    seen = use(python, tmp_path / "elsewhere", path=str(checkout))
    check(seen, checkout, package=checkout / "tflms", rules=checkout / "rules")


def test_the_wheel_holds_every_module_and_nothing_else(wheel, checkout):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    expected = [
        str(path.relative_to(checkout))
        for pattern in ("*.py", "*.cc", "*.h", "py.typed")
        for path in (checkout / "tflms").rglob(pattern)
    ]
    rules = [*(checkout / "rules").glob("*.toml"), *(checkout / "rules").glob("*.md")]
    expected += [f"tflms/_rules/{path.name}" for path in rules]
    assert sorted(names) == sorted(expected)
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_asks_for_no_flavour_of_tensorflow(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    tensorflow = [line for line in required if "tensorflow" in line]
    assert len(tensorflow) == 2
    assert all("extra ==" in line for line in tensorflow), tensorflow
    assert licences
    assert f"\nVersion: {tflms.__version__}\n" in metadata
    assert "Requires-Python: >=3.11" in metadata
