"""The package's layers: who may import whom and TensorFlow, and how long a module may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tflms"
LONGEST_MODULE = 400  # lines

# From the ground up; a module imports from its own layer and from those before it in this list.
LAYERS = (
    ("errors", "units", "installed", "config"),
    ("graph",),
    ("rewriting",),
    ("planning",),
    ("strategies",),
    ("checkpointing",),
    ("runtime", "keras", "local_updates", "emulator", "report"),
    ("zoo",),
    ("commands",),
    ("", "__main__"),  # the package itself and its command line
)
WITHOUT_TENSORFLOW = (
    *("errors", "units", "installed", "config", "graph", "rewriting", "planning"),
    *("strategies", "checkpointing", "report"),
)
# What measures a chain runs it, and is looked up when it is first used.
EXCEPT = ("checkpointing.measure",)
TENSORFLOW = ("tensorflow", "keras")


def name_of(path: Path) -> str:
    """Return a module's name below ``tflms`` (``graph.ir``; empty for the package itself)."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


SOURCES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
CORE = [
    name
    for name in SOURCES
    if any(is_in(name, place) for place in WITHOUT_TENSORFLOW)
    and not any(is_in(name, place) for place in EXCEPT)
]


def layer_of(module: str) -> int:
    for rank, members in enumerate(LAYERS):
        if module.split(".")[0] in members:
            return rank
    raise AssertionError(f"tflms.{module} belongs to no layer; add it to LAYERS")


def imports_of(module: str, *, top_only: bool = False) -> set[str]:
    """Return the full names that a module imports; for ``from a import b`` both a and a.b."""
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= {child for child in ast.walk(node) if child is not node}
    names = set()
    for node in ast.walk(tree):
        if top_only and node in inside:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"tflms.{module} has a relative import"
            names.add(str(node.module))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_modules(module: str, *, top_only: bool = False) -> list[str]:
    """Return the modules of the package that a module imports."""
    names = imports_of(module, top_only=top_only)
    found = {name.removeprefix("tflms").lstrip(".") for name in names if is_in(name, "tflms")}
    return sorted(name for name in found & set(SOURCES) if name != module)


def reads_tensorflow(module: str, *, top_only: bool = False) -> list[str]:
    names = imports_of(module, top_only=top_only)
    return sorted(name for name in names if any(is_in(name, package) for package in TENSORFLOW))


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_to_the_ground(module):
    # `from tflms import graph` also names the package itself, which is no use of it.
    targets = [target for target in imported_modules(module) if target]
    upward = [target for target in targets if layer_of(target) > layer_of(module)]
    assert not upward, f"tflms.{module} imports from layers over it: {upward}"


def test_no_module_imports_itself_by_way_of_others():
    graph = nx.DiGraph()
    for module in SOURCES:
        for target in imported_modules(module, top_only=True):
            if target:
                graph.add_edge(module, target)
    assert list(nx.simple_cycles(graph)) == []


@pytest.mark.parametrize("module", CORE)
def test_the_core_does_not_import_tensorflow(module):
    assert reads_tensorflow(module) == []


@pytest.mark.parametrize("module", [name for name in SOURCES if is_in(name, "zoo")])
def test_the_zoo_imports_tensorflow_only_when_it_builds(module):
    assert reads_tensorflow(module, top_only=True) == []


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_holds_one_idea(module):
    lines = SOURCES[module].read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_MODULE, f"tflms.{module} has {lines} lines"


def run_without_tensorflow(code: str) -> str:
    """Run code in a process in which TensorFlow and Keras cannot be imported."""
    blocked = "import sys; sys.modules.update(tensorflow=None, keras=None)\n"
    command = [sys.executable, "-c", blocked + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_folder_is_a_package():
    folders = {path.parent for path in SOURCES.values()}
    assert [
        str(path.relative_to(ROOT)) for path in folders if not (path / "__init__.py").exists()
    ] == []


def test_the_core_can_be_imported_where_tensorflow_is_missing():
    core = [
        name for name in SOURCES if any(is_in(name, place) for place in WITHOUT_TENSORFLOW if place)
    ]
    assert len(core) > 10
    lines = [f"import {'.'.join(['tflms', name])}" for name in core if name]
    run_without_tensorflow("\n".join(["import tflms", *lines]))


def test_importing_the_package_loads_no_tensorflow():
    code = "import sys, tflms; print([n for n in ('tensorflow', 'keras') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_missing_tensorflow_is_told_with_what_to_install():
    answer = run_without_tensorflow(
        "from tflms import installed\n"
        "from tflms.errors import TflmsError\n"
        "try:\n"
        "    installed.require_tensorflow()\n"
        "except TflmsError as error:\n"
        "    print(error)\n"
    )
    assert "TensorFlow is missing" in answer
    assert "pip install 'tflms[tensorflow]'" in answer
    assert "pip install 'tflms[cpu]'" in answer


def test_the_checks_themselves_see_what_they_look_for():
    assert "errors" in imported_modules("units")
    assert "tensorflow" in reads_tensorflow("zoo.graphs.mlp")
    assert reads_tensorflow("zoo.graphs.mlp", top_only=True) == []
    assert layer_of("graph.ir") < layer_of("rewriting.engine") < layer_of("runtime.read")
