"""Recomputation in sessions on the emulated accelerator: the same numbers, real peaks."""

from __future__ import annotations

from tests.support.emulated import run_on_emulator

CODE = """
from tests.emulated.training import compare
result = compare(name, size, configs, steps=steps)
"""


def trained(name, configs, *, steps=3, memory="2GB", **size):
    found = run_on_emulator(
        CODE, memory_bytes=memory, name=name, size=size, configs=configs, steps=steps
    )
    plain = found["plain"]
    for key in ("losses", "variables"):
        assert found["again"][key] == plain[key], "the plain run does not equal itself"
        for config, run in zip(configs, found["rewritten"], strict=True):
            assert run[key] == plain[key], f"{key} differ with {config}"
    return plain, found["rewritten"]


def test_every_strategy_trains_the_perceptron_alike_and_within_its_limit():
    limited = ("optimal_checkpointing", "best_periodic", "sqrt_n", "revolve",
               "revolve_heterogeneous", "drop_inputs")  # fmt: skip
    configs = [{"strategy": s, "memory_limit": 0.6, "batch_size": 2048} for s in limited]
    configs += [{"strategy": s, "batch_size": 2048} for s in ("periodic", "recompute_all")]
    plain, runs = trained("mlp", configs, memory="1GB", layers=20, width=128)
    buffer = 2048 * 128 * 4  # threads may hold one activation longer than was planned
    for run in runs[: len(limited)]:
        assert run["predicted"] <= 0.61 * plain["peak"]
    for run in runs:
        assert abs(run["peak"] - run["predicted"]) <= 2 * buffer
        assert run["to_host"] == 0
    assert runs[-1]["peak"] < 0.4 * plain["peak"]


def test_resnet_50_trains_in_60_percent_of_its_memory_with_statistics_moved_once():
    plain, (run,) = trained(
        "resnet50",
        [{"strategy": "optimal_checkpointing", "memory_limit": 0.6}],
        image=112,
        batch=16,
        steps=2,
    )
    assert run["peak"] <= 0.63 * plain["peak"]


def test_the_unet_is_a_chain_of_blocks_whose_skips_are_kept():
    configs = [
        {"strategy": "optimal_checkpointing", "memory_limit": limit} for limit in (0.75, 0.68)
    ]
    plain, runs = trained("unet3d", configs, size=64, steps=1, memory="1GB")
    for config, run in zip(configs, runs, strict=True):
        assert run["peak"] <= config["memory_limit"] * plain["peak"]
        assert run["to_host"] == 0
