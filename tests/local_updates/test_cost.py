from __future__ import annotations

import keras
import pytest

from tests.local_updates.local_nets import compiled, mlp
from tflms.local_updates import LocalTrainer, split
from tflms.local_updates.cost import step_cost, table, traced_step_flops


@pytest.fixture(scope="module")
def wide():
    """The paper's MLP: 3072 inputs, 8 hidden layers of 4096, 10 classes."""
    stack = [keras.layers.Dense(4096, activation="relu") for _ in range(8)]
    return keras.Sequential([keras.Input((3072,)), *stack, keras.layers.Dense(10)])


def test_the_serial_cost_of_the_wide_network_is_that_of_the_reference_table(wide):
    # Blocks are the eight hidden layers, the last one with the output layer.
    layer_ends = [layer.name for layer in wide.layers[:7]]
    found = {}
    for name, method, at in (
        ("backprop", "backprop", []),
        ("2 chunks", "chunked", [layer_ends[3]]),
        ("4 chunks", "chunked", [layer_ends[i] for i in (1, 3, 5)]),
        ("8 chunks", "chunked", layer_ends),
        ("overlapping", "overlapping", layer_ends),
    ):
        plan = split(wide, at=at) if at else split(wide, chunks=1)
        found[name] = step_cost(LocalTrainer(wide, plan, method=method))
    again = step_cost(
        LocalTrainer(wide, split(wide, at=layer_ends), method="overlapping"), form="duplicates"
    )
    serial = {k: round(c.serial_flops / c.batch_size / 1e6, 1) for k, c in found.items()}
    assert serial == {
        "backprop": 780.4,
        "2 chunks": 402.9,
        "4 chunks": 201.6,
        "8 chunks": 100.9,
        "overlapping": 201.6,
    }
    shorter = {
        k: round(found["backprop"].serial_flops / c.serial_flops, 2) for k, c in found.items()
    }
    assert [shorter[k] for k in ("2 chunks", "4 chunks", "8 chunks")] == [1.94, 3.87, 7.73]
    total = {k: round(c.total_flops / c.batch_size / 1e6, 1) for k, c in found.items()}
    assert [total[k] for k in ("backprop", "2 chunks", "4 chunks", "8 chunks")] == [
        780.4,
        780.6,
        781.1,
        782.1,
    ]
    assert round(again.total_flops / again.batch_size / 1e6, 1) == 1385.8
    assert "7.73x" in table(list(found.values()))


def test_a_cut_costs_half_the_bytes_of_backpropagation_and_windows_pay_for_what_they_send_back():
    model = mlp()
    plan = split(model, chunks=3)
    once = step_cost(LocalTrainer(model, plan, method="chunked"))
    both = step_cost(LocalTrainer(model, plan, method="backprop"))
    assert once.step_bytes == sum(cut.nbytes for cut in plan.cuts)
    assert both.step_bytes == 2 * once.step_bytes
    assert step_cost(LocalTrainer(model, plan, method="overlapping")).step_bytes == both.step_bytes


def test_one_device_in_turn_needs_less_than_backpropagation_and_the_largest_chunk_alone():
    model = mlp(depth=6, width=64, inputs=64, dropout=0)
    plan = split(model, batch_size=4096)
    greedy = step_cost(LocalTrainer(model, plan))
    backprop = step_cost(LocalTrainer(model, plan, method="backprop"))
    assert greedy.fused_bytes < 0.5 * backprop.fused_bytes
    assert len(greedy.device_bytes) == len(plan.chunks)


def test_the_traced_step_runs_what_the_convention_says_less_the_unused_input_products():
    model = mlp(depth=3, width=32, inputs=16, dropout=0, norm=False)
    trainer = compiled(LocalTrainer(model, split(model), method="backprop"))
    convention = step_cost(trainer).total_flops
    assert traced_step_flops(trainer) == convention - 2 * 32 * 16 * 32
