"""Products in a row with constant factors: Grappler regroups them, and a rewrite lets it."""

from __future__ import annotations

import numpy as np
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


def test_a_gradient_that_nobody_asks_for_does_not_hide_a_row_of_products():
    """That of the scale of dropout reads what lies between two products."""
    expected, _ = trained_in_a_graph(None)
    config = {"memory_limit": 0.8, "min_swap_bytes": 0}
    assert trained_in_a_graph(config) == (expected, True)


def trained_in_a_graph(config):
    """Train with gelu and dropout; return the weights' bytes, and whether a value is parked."""
    swapped = False
    with tf.Graph().as_default() as graph:
        tf.compat.v1.set_random_seed(1)
        start = np.random.default_rng(0).standard_normal((4, 64, 64), np.float32) / 8
        weights = [tf.Variable(one) for one in start]
        x = tf.constant(np.random.default_rng(1).standard_normal((128, 64), np.float32))
        for weight in weights:
            x = tf.nn.dropout(tf.nn.gelu(tf.matmul(x, weight)), rate=0.2, seed=1)
        loss = tf.reduce_mean(x**2)
        train_op = tf.compat.v1.train.GradientDescentOptimizer(50.0).minimize(loss)
        init = tf.compat.v1.global_variables_initializer()
        if config is not None:
            report = tflms.rewrite(graph, config, loss=loss, fetches=[train_op])
            swapped = bool(report.swaps)
        with tf.compat.v1.Session() as session:
            session.run(init)
            for _ in range(2):
                session.run(train_op)
            return b"".join(w.tobytes() for w in session.run(weights)), swapped
