"""The examples run, in small, as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_example(name: str, *words: str, folder: Path) -> tuple[int, str]:
    settings = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *words],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_full_resolution_example_trains_where_plain_runs_out_of_memory(tmp_path):
    from matplotlib import image

    status, told = run_example(
        *("unet3d_full_resolution.py", "--size", "64", "--steps", "4"),
        *("--picture", "slice.png"),
        folder=tmp_path,
    )
    assert status == 0, told
    assert "OOM when allocating" in told
    losses = [float(loss) for loss in re.findall(r"^step \d+ +loss ([0-9.]+)", told, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    picture = image.imread(tmp_path / "slice.png")
    assert picture.shape[1] > 2 * picture.shape[0] and picture.std() > 0.1


def test_the_full_resolution_example_fails_where_plain_fits(tmp_path):
    status, told = run_example(
        *("unet3d_full_resolution.py", "--size", "32", "--memory", "400MB"), folder=tmp_path
    )
    assert status == 1
    assert "it fits" in told


def losses_of(told: str) -> list[str]:
    return re.findall(r"loss ([0-9.]+)", told)


def test_resnet_trains_in_a_session_with_settings_from_the_command_line(tmp_path):
    base = ("resnet_session.py", "--batch", "4", "--image", "64", "--steps", "2")
    status, told = run_example(
        *base,
        *("--memory", "1GB", "--strategy", "direct_order", "--lb", "2", "--n-tensors", "30"),
        *("--no-fuse-swapins", "--swap-branches", "--branch-threshold", "20"),
        folder=tmp_path,
    )
    assert status == 0, told
    assert "tflms: direct_order" in told
    assert "30 values" in told
    alive = re.search(r"(\d+) of (\d+) inserted operations are alive", told)
    assert alive and alive[1] == alive[2] != "0"
    plain_status, plain = run_example(*base, "--strategy", "none", folder=tmp_path)
    assert plain_status == 0, plain
    assert losses_of(told) == losses_of(plain) and len(losses_of(told)) == 2


def test_resnet_says_when_its_memory_is_not_enough(tmp_path):
    status, told = run_example(
        *("resnet_session.py", "--batch", "4", "--image", "64", "--strategy", "none"),
        *("--memory", "120MB"),
        folder=tmp_path,
    )
    assert status == 1
    assert "out of memory" in told and "OOM when allocating" in told


def test_a_deep_resnet_recomputes_where_plain_runs_out_of_memory(tmp_path):
    status, told = run_example(
        *("deep_resnet.py", "--depth", "29", "--steps", "2", "--share", "0.6"), folder=tmp_path
    )
    assert status == 0, told
    assert re.search(r"plain, [0-9.]+ MB: ResourceExhausted", told)
    recomputed = re.search(r"trained, .* (\d+) operations run again", told)
    assert recomputed and int(recomputed[1]) > 50
    assert "bit by bit: True" in told
