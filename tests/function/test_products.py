"""Products in a row with constant factors: Grappler regroups them, and a rewrite lets it."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tflms
from tests.function.steps import Net, batch, train


def step_of(net):
    def step(x):
        with tf.GradientTape() as tape:
            for weight in net.weights:
                x = tf.nn.gelu(tf.matmul(x, weight), approximate=False)
                x = tf.tanh(x) + x
            loss = tf.reduce_mean(x**2)
        gradients = tape.gradient(loss, net.weights)
        for weight, gradient in zip(net.weights, gradients, strict=True):
            weight.assign_sub(0.5 * gradient)
        return loss

    return step


@pytest.mark.parametrize("config", [{"memory_limit": 0.7}, {"strategy": "chain_rule", "lb": 2}])
def test_the_gradient_of_gelu_rounds_as_before(config):
    batches = [batch(128, 64, seed=i) for i in range(2)]
    plain, mine = Net(width=64, depth=6), Net(width=64, depth=6)
    expected = train(tf.function(step_of(plain)), plain, batches)
    step = tflms.function(step_of(mine), {**config, "min_swap_bytes": 0})
    assert train(step, mine, batches) == expected
    assert step.report().swaps
