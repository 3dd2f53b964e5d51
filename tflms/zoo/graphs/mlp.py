"""A deep multilayer perceptron: the simplest graph whose activations outweigh its weights."""

from __future__ import annotations

import numpy as np

from tflms.zoo.graphs.training import TrainingGraph, Variables, new_graph, optimizer


def mlp(
    layers: int = 30,
    width: int = 512,
    *,
    batch: int = 2048,
    learning_rate: float = 0.1,
    seed: int = 0,
    device: str | None = None,
) -> TrainingGraph:
    """Build ``layers`` times ReLU(x W), trained by gradient descent on the mean output.

    The batch dimension is unknown to the graph, as it is in most session programs; ``batch`` is
    what the feeds hold.

    Args:
        layers: number of layers.
        width: units per layer, and features of the input.
        batch: examples per step.
        learning_rate: of plain gradient descent.
        seed: of weights and input.
        device: where everything is placed; None leaves it to TensorFlow.
    """
    import tensorflow as tf

    variables = Variables(seed)
    activations = []
    with new_graph(device) as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, width], name="x")
        h = x
        for i in range(layers):
            w = variables.normal(f"w{i}", [width, width], stddev=0.05)
            h = tf.nn.relu(tf.matmul(h, w))
            activations.append(h)
        loss = tf.reduce_mean(h, name="loss")
        train_op = optimizer("sgd", learning_rate)(loss)
        init_op = tf.compat.v1.global_variables_initializer()
    data = np.random.RandomState(seed).randn(batch, width).astype("f")
    return TrainingGraph(graph, loss, train_op, init_op, {x: data}, h, tuple(activations))
