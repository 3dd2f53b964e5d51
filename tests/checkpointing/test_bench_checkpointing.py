"""The bench of schedules runs, in small, and its rows hold together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tflms.commands.bench_checkpointing import OURS, Row, conclusions
from tflms.commands.checkpointing_run import Bench
from tflms.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_the_bench_measures_each_strategy_at_each_limit(tmp_path):
    out = tmp_path / "rows.json"
    options = ["--models", "mlp", "--batch", "512", "--limits", "0.1", "0.8", "--rounds", "2"]
    strategies = ["--strategies", "best_periodic", "revolve_heterogeneous"]
    done = subprocess.run(
        [sys.executable, "-m", "tflms", "bench", "checkpointing", *options, *strategies,
         "--json", str(out), "--plot", str(tmp_path / "times.png")],
        cwd=ROOT, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr[
        -2000:
    ]  # 1: slower than a rival, on a busy machine
    rows = json.loads(out.read_text())
    assert len(rows) == 6
    ours = [row for row in rows if row["strategy"] == "optimal_checkpointing"]
    assert all(row["step_seconds"] > 0 for row in ours)
    assert ours[0]["limit_bytes"] < ours[1]["limit_bytes"]
    for row in rows:
        if row["step_seconds"]:
            # One activation of a megabyte may be held longer than was planned.
            assert row["peak_bytes"] <= row["limit_bytes"] + (1 << 20)
            assert row["predicted_times_plain"] > 1
    told = {(row["limit_bytes"], row["strategy"]): row["predicted_times_plain"] for row in rows}
    for limit in {limit for limit, _ in told}:
        best = told[limit, "optimal_checkpointing"]
        assert best <= 1.001 * (told[limit, "revolve_heterogeneous"] or best)
    assert "throughput over best periodic" in done.stdout or "nowhere did both" in done.stdout
    assert "predicted over measured time" in done.stdout.replace("\n", " ")
    assert (tmp_path / "times.png").stat().st_size > 1000


def test_a_model_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="no model 'lenet'; write one of resnet18"):
        Bench("lenet", None, None, Path())


def test_the_conclusion_tells_the_mean_its_bound_and_where_periodic_does_not_fit():
    rows = [
        Row("net", 100, OURS, 0, 90, 0.0, 0.0, 1.1, 0.0, 1.0909),
        Row("net", 100, "best_periodic", 0, 80, 0.0, 0.0, 1.2, 0.0, 1.0),
        Row("net", 50, OURS, 0, 45, 0.0, 0.0, 1.3),
        Row("net", 50, "best_periodic"),
    ]
    (line,) = conclusions(rows)
    assert "mean of 1 limits: predicted 1.091" in line and "takes 1.200 of save-all" in line
    assert "at 1 more limits it does not fit" in line
