"""What a rewrite leaves together, or unordered, so that TensorFlow takes the kernels it took."""

from __future__ import annotations

import pytest

from tests.strategies.step import chain, rewrite
from tflms.graph import text


@pytest.mark.parametrize(
    ("device", "default", "stays"),
    [
        ("", "CPU", True),
        ("", "GPU", False),
        ("/cpu:0", "GPU", True),
        ("/emu:0", "CPU", False),
        ("/job:worker/replica:0/task:0/device:CPU:0", "GPU", True),
    ],
)
def test_only_where_the_cpu_runs_a_pool_its_result_stays_for_the_gradient(device, default, stays):
    where = f" @{device}" if device else ""
    source = (
        chain(9)
        .replace("a4 = MatMul(h3, r4)", f"q = MaxPool(h3) : f32[64,8]{where}\na4 = MatMul(q, r4)")
        .replace("dw4 = MatMul(h3, da4)", "dw4 = MatMul(q, da4)")
        .replace(
            "dh3 = MatMul(da4, r4)",
            "dq = MatMul(da4, r4) : f32[64,8]\ndh3 = MaxPoolGrad(h3, q, dq)",
        )
    )
    outcome = rewrite(source, strategy="direct_order", default_kind=default)
    assert ("q" in outcome.names()) == (not stays)
    assert "h3" in outcome.names()
    graph = outcome.graph
    pooled = graph.producer(graph.op(text.op_named(graph, "dh3")).inputs[1])
    assert (pooled.type == "MaxPool") == stays


def test_elementwise_gradients_are_not_put_in_an_order():
    # Grappler draws common factors out of their sums, where no control edge touches them.
    source = (
        chain(9)
        .replace("a5 = MatMul(h4, r5)", "m = Mul(h4, h4) : f32[64,8]\na5 = MatMul(m, r5)")
        .replace("dw5 = MatMul(h4, da5)", "dw5 = MatMul(m, da5)")
        .replace(
            "dh4 = MatMul(da5, r5) : f32[64,8]",
            "dm = MatMul(da5, r5) : f32[64,8]\n"
            "p = Mul(dm, h4) : f32[64,8]\ns = Neg(dm) : f32[64,8]\nt = Exp(s) : f32[64,8]\n"
            "dh4 = AddN(p, t) : f32[64,8]",
        )
    )
    outcome = rewrite(source, strategy="direct_order")
    graph = outcome.graph
    assert "h4" in outcome.names()
    assert graph.op(text.op_named(graph, "s")).controls == []
    ordered = graph.op(text.op_named(graph, "dh2")).controls
    assert [graph.op(c).name for c in ordered] == ["dw3"]
