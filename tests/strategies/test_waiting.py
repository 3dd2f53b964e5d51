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


def test_an_input_that_a_padding_makes_is_read_as_before():
    # TensorFlow merges the two; a copy between them would make it give that up.
    source = chain(9).replace("a4 = MatMul(h3, r4)", "p = Pad(h3) : f32[64,8]\na4 = MatMul(p, r4)")
    outcome = rewrite(source, strategy="direct_order")
    product = outcome.graph.op(text.op_named(outcome.graph, "a4"))
    assert outcome.graph.producer(product.inputs[0]).type == "Pad"
    assert waiting(outcome)["h1--tflms/swap_out"] == ["a5"]


def test_a_pooling_waits_itself():
    source = chain(9).replace(
        "a4 = MatMul(h3, r4)", "q = MaxPool(h3) : f32[64,8]\na4 = MatMul(q, r4)"
    )
    found = waiting(rewrite(source, strategy="direct_order"))
    assert found["h1--tflms/swap_out"] == ["q"]
