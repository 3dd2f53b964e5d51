"""Sums of several values on the device: the order does not hang on how much memory a step takes."""

from __future__ import annotations

from tests.support.emulated import run_on_emulator

# 1e8 + 1 is 1e8 in float32: the sum is 1 from the left and 0 from the right.
CODE = """
def sums(length):
    @tf.function
    def total(big, one):
        return tf.add_n([tf.abs(big), tf.negative(big), tf.nn.relu(one)])

    return sorted(set(total(tf.fill([length], 1e8), tf.ones([length])).numpy().tolist()))

tf.config.threading.set_inter_op_parallelism_threads(1)
result = [sums(length) for length in lengths]
"""


def test_a_sum_has_the_same_order_beyond_the_256_mib_that_grappler_takes_for_the_devices_memory():
    lengths = [1000, 14_000_000]  # five values of 56 MB at once
    assert run_on_emulator(CODE, lengths=lengths) == [[1.0], [1.0]]
