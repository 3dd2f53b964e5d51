"""Small training graphs for tests of the hand-back."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
SETTINGS = {"min_swap_bytes": 0, "strategy": "direct_order"}


def chain(layers=6, *, scope="net", resource=True, train=True):
    """A deep chain of dense layers; returns graph, input, loss and train op."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 8], "x")
        h = x
        for i in range(layers):
            with v1.variable_scope(f"{scope}/layer{i}"):
                w = v1.get_variable(
                    "w",
                    initializer=np.random.RandomState(i).randn(8, 8).astype("f") / 3,
                    use_resource=resource,
                )
                h = tf.tanh(tf.matmul(h, w), name="act")
        loss = tf.reduce_mean(h**2, name="loss")
        op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train") if train else None
    return graph, x, loss, op


def run(graph, x, loss, train, steps=3):
    """Losses and variables of a few steps."""
    data = np.random.RandomState(9).randn(5, 8).astype("f")
    with graph.as_default(), v1.Session(graph=graph) as session:
        variables = v1.global_variables()
        for variable in variables:
            session.run(variable.initializer)
        out = [session.run([loss, train], {x: data})[0] for _ in range(steps)]
        return out, session.run(variables)


def serialized(graph):
    """The graph byte for byte."""
    return graph.as_graph_def().SerializeToString(deterministic=True)
