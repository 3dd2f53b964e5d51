"""On the emulated accelerator: bit-identical training in a fraction of the memory.

Peaks are those of the device's allocator. Determinism is on, and the plain graph first shows that
it repeats itself; without that nothing could be told.
"""

from __future__ import annotations

import pytest

from tests.support.emulated import run_on_emulator

CODE = """
from tests.emulated.training import compare
result = compare(name, size, configs, steps=steps, inter_op_threads=inter_op_threads)
"""


def trained(name, configs, *, steps=5, memory="2GB", inter_op_threads=0, **size):
    found = run_on_emulator(
        CODE, memory_bytes=memory, name=name, size=size, configs=configs, steps=steps,
        inter_op_threads=inter_op_threads,
    )  # fmt: skip
    plain = found["plain"]
    for key in ("losses", "variables"):
        assert found["again"][key] == plain[key], "the plain run does not equal itself"
        for config, run in zip(configs, found["rewritten"], strict=True):
            assert run[key] == plain[key], f"{key} differ with {config}"
    assert plain["falls"]
    assert len(set(plain["losses"])) == steps
    return plain, found["rewritten"]


def test_the_perceptron_needs_70_of_167_megabytes():
    plain, runs = trained(
        "mlp",
        [
            {"strategy": "chain_rule"},
            {"strategy": "direct_order"},
            {"strategy": "chain_rule", "lb": 3, "ub": 50},
            {"strategy": "direct_order", "lb": 4, "fuse_swapins": False},
            {"strategy": "direct_order", "n_tensors": 10},
        ],
        memory="1GB",
    )
    assert 160e6 < plain["peak"] < 175e6
    assert all(28 <= run["swaps"] <= 30 for run in runs[:4])
    assert all(run["peak"] <= 70e6 for run in runs[:2])
    assert all(run["peak"] <= plain["peak"] / 2 for run in runs[2:4])  # values come back sooner
    assert runs[4]["swaps"] == 10
    assert 70e6 < runs[4]["peak"] < plain["peak"]  # fewer values, less saved


@pytest.mark.parametrize("threads", [1, 8])
def test_the_perceptron_needs_no_more_with_few_threads_or_many(threads):
    # With one thread nothing leaves before the forward phase is over, unless something waits.
    configs = [{"strategy": "chain_rule"}, {"strategy": "direct_order"}]
    plain, runs = trained("mlp", configs, steps=2, memory="1GB", inter_op_threads=threads)
    assert all(run["peak"] <= 70e6 < plain["peak"] / 2 for run in runs)


def test_the_unet_trains_alike_with_every_dial():
    plain, runs = trained(
        "unet3d",
        [
            {"strategy": "chain_rule", "lb": 2},
            {"strategy": "direct_order", "lb": 3, "fuse_distance": 0},
            {"strategy": "direct_order", "swap_branches": True, "fuse_swapins": False},
            {"strategy": "chain_rule", "swap_branches": True, "branch_threshold": 4,
             "n_tensors": 6},
        ],
        size=32,
        memory="1GB",
    )  # fmt: skip
    assert all(run["swaps"] >= 6 for run in runs)
    assert all(run["peak"] < plain["peak"] for run in runs)


def test_the_unet_needs_57_percent_of_its_memory():
    plain, runs = trained(
        "unet3d",
        [
            {"strategy": strategy, "swap_branches": True, "branch_threshold": 8}
            for strategy in ("chain_rule", "direct_order")
        ],
        size=64,
        steps=2,
        memory="1GB",
    )
    assert all(run["peak"] <= 0.57 * plain["peak"] for run in runs)


def test_resnet_trains_alike_with_every_dial():
    plain, runs = trained(
        "resnet50",
        [
            {"strategy": "chain_rule", "swap_branches": True},
            {"strategy": "direct_order", "lb": 3},
            {"strategy": "direct_order", "lb": 5, "fuse_swapins": False, "n_tensors": 40},
        ],
        image=64,
        batch=8,
    )
    assert [run["swaps"] for run in runs[:2]] == [runs[0]["swaps"]] * 2
    assert runs[2]["swaps"] == 40
    assert all(run["peak"] < plain["peak"] for run in runs)


def test_resnet_needs_43_percent_of_its_memory():
    plain, (run,) = trained("resnet50", [{"strategy": "chain_rule"}], image=112, batch=32, steps=2)
    assert run["peak"] <= 0.43 * plain["peak"]
