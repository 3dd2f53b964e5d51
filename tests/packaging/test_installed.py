"""Which TensorFlow is there, seen on distributions made for the test."""

from __future__ import annotations

import sys

import pytest

from tflms import installed
from tflms.errors import TflmsError


def place(folder, monkeypatch, *, name=None, version=None):
    """Make ``folder`` the only place that Python imports from, with one TensorFlow in it."""
    package = folder / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it is looked at, not imported')\n")
    if name is not None:
        record = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow-cpu", "tf-nightly"])
def test_either_flavour_will_do(tmp_path, monkeypatch, name):
    place(tmp_path, monkeypatch, name=name, version="2.21.0")
    assert installed.tensorflow_version() == (name, "2.21.0")
    installed.require_tensorflow()


def test_a_build_without_a_record_is_accepted(tmp_path, monkeypatch):
    place(tmp_path, monkeypatch)
    assert installed.tensorflow_version() == ("tensorflow", "unknown")
    installed.require_tensorflow()


@pytest.mark.parametrize("version", ["2.20.0", "2.9.1", "1.15.5"])
def test_an_old_tensorflow_is_refused_with_its_version(tmp_path, monkeypatch, version):
    place(tmp_path, monkeypatch, name="tensorflow-cpu", version=version)
    with pytest.raises(TflmsError, match=f"2.21 or newer, and tensorflow-cpu {version} is here"):
        installed.require_tensorflow()


@pytest.mark.parametrize("version", ["2.22.0", "3.0.0rc1", "2.21.0.dev20260901"])
def test_a_newer_tensorflow_is_accepted(tmp_path, monkeypatch, version):
    place(tmp_path, monkeypatch, name="tf-nightly", version=version)
    installed.require_tensorflow()
