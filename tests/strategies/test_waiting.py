"""Which operations wait for swap-outs, and that waiting closes no cycle and drags nothing along."""

from __future__ import annotations

import pytest

from tests.strategies.step import chain, rewrite
from tflms.graph import text

BOTH = pytest.mark.parametrize("strategy", ["direct_order", "chain_rule"])


def waiting(outcome):
    """For each swap-out, the operations that wait for it, by the operation that they feed."""
    graph, found = outcome.graph, {}
    for op in graph.ops():
        for before in op.controls:
            if graph.op(before).role == "swap_out":
                readers = [u.op for v in op.outputs for u in graph.uses(v)]
                names = [graph.op(o).name for o in readers] if op.role else [op.name]
                found.setdefault(graph.op(before).name, []).extend(names)
    return found


@BOTH
def test_one_layer_runs_while_a_value_leaves(strategy):
    found = waiting(rewrite(chain(9), strategy=strategy))
    assert found["h1--tflms/swap_out"] == ["a4"]  # a2 reads h1, and a3 runs in the meantime
    assert found["h5--tflms/swap_out"] == ["a8"]


@BOTH
def test_a_product_waits_through_its_input_and_not_itself(strategy):
    outcome = rewrite(chain(9), strategy=strategy)
    graph = outcome.graph
    product = graph.op(text.op_named(graph, "a4"))
    assert product.controls == []
    handle = graph.producer(product.inputs[0])
    assert handle.role == "identity"
    assert [graph.op(c).name for c in handle.controls] == ["h1--tflms/swap_out"]


@BOTH
def test_only_forward_operations_wait(strategy):
    outcome = rewrite(chain(9), strategy=strategy)
    for names in waiting(outcome).values():
        for name in names:
            assert outcome.phases.forward[text.op_named(outcome.graph, name)]


@BOTH
def test_the_last_layers_have_nothing_behind_them_that_waits(strategy):
    outcome = rewrite(chain(9), strategy=strategy)
    assert "h8--tflms/swap_out" not in waiting(outcome)


@pytest.mark.parametrize(
    "between",
    ["Pad(h3)", "Transpose(h3, perm)", "Reshape(h3, perm)", "Mul(h3, one)", "Cast(h3)"],
)
def test_what_tensorflow_merges_with_its_reader_stays_behind_the_copy(between):
    lines = f"perm = Const() : i32[2]\np = {between} : f32[64,8]\na4 = MatMul(p, r4)"
    outcome = rewrite(chain(9).replace("a4 = MatMul(h3, r4)", lines), strategy="direct_order")
    graph = outcome.graph
    product = graph.op(text.op_named(graph, "a4"))
    merged = graph.producer(product.inputs[0])
    assert merged.name == "p"
    assert graph.producer(merged.inputs[0]).role == "identity"
    assert waiting(outcome)["h1--tflms/swap_out"] == ["p"]


def test_a_product_of_two_activations_is_held_in_front_of_its_reader():
    lines = "p = Mul(h3, h2) : f32[64,8]\na4 = MatMul(p, r4)"
    outcome = rewrite(chain(9).replace("a4 = MatMul(h3, r4)", lines), strategy="direct_order")
    assert waiting(outcome)["h1--tflms/swap_out"] == ["a4"]


def test_nothing_waits_that_the_value_needs():
    # p is read by the value that leaves and by a product behind it: it may not wait for that value.
    lines = "p = Pad(h1) : f32[64,8]\na2 = MatMul(p, r2)"
    source = chain(9).replace("a2 = MatMul(h1, r2)", lines)
    source = source.replace("a5 = MatMul(h4, r5)", "s4 = MatMul(p, r5) : f32[64,8]\n"
                            "m4 = Add(h4, s4) : f32[64,8]\na5 = MatMul(m4, r5)")  # fmt: skip
    outcome = rewrite(source, strategy="direct_order")
    assert not outcome.graph.producer(text.value_named(outcome.graph, "p")).controls
    assert all("a2" not in names for names in waiting(outcome).values())


def test_a_pooling_waits_itself():
    source = chain(9).replace(
        "a4 = MatMul(h3, r4)", "q = MaxPool(h3) : f32[64,8]\na4 = MatMul(q, r4)"
    )
    found = waiting(rewrite(source, strategy="direct_order"))
    assert found["h1--tflms/swap_out"] == ["q"]
