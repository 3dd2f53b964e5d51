"""Kernels that oneDNN chooses in pairs, forward and backward, stay pairs in a rewritten graph."""

from __future__ import annotations

import pytest

from tests.support.emulated import run_on_emulator

CODE = """
import tflms

tf.config.experimental.enable_op_determinism()


def overlapping_pools(levels=5):
    # Pooling windows that overlap: how their gradients are summed is up to the kernel.
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4, 12, 12, 8], "x")
        h = x
        for i in range(levels):
            weights = np.random.RandomState(i).randn(3, 3, 8, 8).astype("f") / 8
            k = v1.get_variable(f"k{i}", initializer=weights)
            h = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(h, k, 1, "SAME")), 3, 1, "SAME")
            h = tf.nn.local_response_normalization(h, name=f"norm{i}")
        loss = tf.reduce_mean(h**2)
        train = v1.train.GradientDescentOptimizer(0.5).minimize(loss)
    return graph, loss, train


def steps(graph, loss, train):
    data = np.random.RandomState(9).randn(4, 12, 12, 8).astype("f")
    with graph.as_default(), v1.Session(graph=graph) as session:
        session.run(v1.global_variables_initializer())
        losses = [session.run([loss, train], {"x:0": data})[0] for _ in range(3)]
        found = losses + session.run(v1.global_variables())
    return [np.asarray(value).tobytes().hex() for value in found]


plain = steps(*overlapping_pools())
graph, loss, train = overlapping_pools()
config = {"min_swap_bytes": 0, **dials}
report = tflms.rewrite(graph, config, loss=loss, fetches=[train])
result = {
    "repeats": steps(*overlapping_pools()) == plain,
    "equal": steps(graph, loss, train) == plain,
    "swaps": len(report.swaps),
}
"""


@pytest.mark.parametrize(
    ("dials", "swaps"),
    [
        ({"strategy": "direct_order"}, 5),
        ({"strategy": "chain_rule"}, 5),
        ({"memory_limit": 0.9}, 1),
    ],
    ids=str,
)
def test_gradients_of_overlapping_pools_come_out_bit_by_bit(dials, swaps):
    found = run_on_emulator(CODE, memory_bytes=None, dials=dials)
    assert found["repeats"] and found["equal"]
    assert found["swaps"] >= swaps
