"""The bench of the solver: real measurements, on chains short enough for a test."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tflms.checkpointing import save_all
from tflms.commands.bench_solver import resnet_chain, run
from tflms.errors import ConfigError


def test_the_bench_measures_every_chain_at_every_limit_and_prints_what_it_found() -> None:
    output = io.StringIO()
    rows = run(
        stages=(20,),
        shares=(0.0, 0.5),
        slots=50,
        repeats=1,
        console=Console(file=output, width=140),
    )
    assert [(row.chain, row.share) for row in rows] == [
        ("resnet", 0.0),
        ("resnet", 0.5),
        ("random", 0.0),
        ("random", 0.5),
    ]
    for row in rows:
        assert row.seconds > 0
        assert row.peak_bytes <= row.limit_bytes
        assert row.makespan_ratio > 1
        assert row.met
    assert output.getvalue().count("resnet") == 2


def test_the_chain_of_a_resnet_has_blocks_that_save_three_times_their_output() -> None:
    chain = resnet_chain(339)
    assert chain.stages == 339
    assert chain.ends_in_loss
    assert chain.saved_bytes[1:334] == tuple(3 * size for size in chain.activation_bytes[2:335])
    assert save_all(chain).peak_bytes > 9e9  # 1001 layers at batch 64 do not fit in 8 GB
    with pytest.raises(ConfigError, match="at least 9"):
        resnet_chain(5)
