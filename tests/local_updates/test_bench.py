from __future__ import annotations

import io

import pytest
from rich.console import Console

from tflms.commands import bench_local
from tflms.commands.bench import benches
from tflms.errors import ConfigError, TflmsError


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def test_the_bench_is_found():
    assert benches()["local"] == "traffic, serial cost, throughput and memory of local updates"


def test_throughput_is_the_median_of_interleaved_rounds(monkeypatch, console):
    asked = []
    two = iter([[1.0, 3.0], [1.0, 1.0], [1.25, 1.25]])

    def train(kind, batch, batches):
        asked.append((kind, batch, batches))
        return {"seconds": [2.0, 2.0] if kind == "one" else next(two)}

    monkeypatch.setattr(bench_local, "_train", train)
    (row,) = bench_local.run(parts=["throughput"], rounds=3, batch=8, batches=5, console=console)
    assert asked == [("one", 8, 5), ("two", 8, 5), ("one", 8, 5), ("one", 8, 5)] * 3
    assert row.value == 1.6 and row.met
    assert "1.00 to 2.00 in 3 rounds; two runs that share nothing: 2.00" in row.detail
    assert "1.600" in console.file.getvalue()


def test_memory_is_missed_where_greedy_training_holds_too_much(monkeypatch, console):
    held = {"backprop": 1000, "plain": 700}

    def peak(device, batch, case):
        greedy = {"cpu": 105, "emu": 151}
        return held.get(case.removesuffix(",ordered"), greedy[device])

    monkeypatch.setattr(bench_local, "_peak", peak)
    rows = bench_local.run(parts=["memory"], console=console)
    assert [row.met for row in rows] == [True, True, False, False]
    assert [row.value for row in rows] == [0.105, 0.15, 0.151, 151 / 700]


def test_what_fails_is_told_with_its_complaint():
    with pytest.raises(TflmsError, match="no such case here"):
        bench_local._python("-c", "raise SystemExit('no such case here')")
    with pytest.raises(ConfigError, match="no part 'speed'"):
        bench_local.run(parts=["speed"])
