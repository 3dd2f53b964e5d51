"""The layers that the image classifiers among the training graphs are made of."""

from __future__ import annotations

from typing import Any

import numpy as np

from tflms.errors import ConfigError
from tflms.zoo.graphs.training import Feed, TrainingGraph, Variables, new_graph, optimizer

_MOMENTUM = 0.9  # of the moving statistics
_EPSILON = 1e-5  # of batch normalization


class Layers:
    """Makes the layers of one network, and keeps the activations that they have made so far."""

    def __init__(self, variables: Variables) -> None:
        self.activations: list[Any] = []
        self.variables = variables

    def kept(self, x: Any) -> Any:
        """Note an activation that the backward phase reads again, and return it."""
        if all(x is not other for other in self.activations):
            self.activations.append(x)
        return x

    def conv(self, x: Any, channels: int, *, edge: int, stride: int = 1) -> Any:
        """Return a convolution without a bias."""
        import tensorflow as tf

        kernel = self.variables.kernel("kernel", [edge, edge, int(x.shape[-1]), channels])
        return tf.nn.conv2d(x, kernel, stride, "SAME")

    def norm(self, x: Any) -> Any:
        """Return batch normalization in training mode; moving statistics are tracked."""
        import tensorflow as tf

        channels = int(x.shape[-1])
        scale = self.variables.constant("scale", [channels], 1.0)
        offset = self.variables.constant("offset", [channels], 0.0)
        normal, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            self.kept(x), scale, offset, epsilon=_EPSILON, is_training=True
        )
        self._track("mean", mean, start=0.0)
        self._track("variance", variance, start=1.0)
        return normal

    def conv_norm(self, x: Any, channels: int, *, edge: int, stride: int, name: str) -> Any:
        """Return a convolution and its normalization."""
        import tensorflow as tf

        with tf.compat.v1.variable_scope(name):
            return self.norm(self.conv(x, channels, edge=edge, stride=stride))

    def norm_relu_conv(
        self, x: Any, channels: int, *, edge: int, stride: int = 1, name: str
    ) -> Any:
        """Return a convolution of the normalized and rectified input."""
        import tensorflow as tf

        with tf.compat.v1.variable_scope(name):
            x = self.kept(tf.nn.relu(self.norm(x)))
            return self.conv(x, channels, edge=edge, stride=stride)

    def pooled_head(self, x: Any, classes: int) -> Any:
        """Return logits: the mean over all places, and one dense layer."""
        import tensorflow as tf

        x = tf.reduce_mean(x, axis=[1, 2])
        with tf.compat.v1.variable_scope("head"):
            features = int(x.shape[-1])
            kernel = self.variables.normal("kernel", [features, classes], stddev=0.01)
            bias = self.variables.constant("bias", [classes], 0.0)
            return tf.nn.bias_add(tf.matmul(x, kernel), bias)

    def _track(self, name: str, statistic: Any, *, start: float) -> None:
        """Keep a moving average of a batch statistic; the train op waits for its update."""
        import tensorflow as tf

        shape = [int(statistic.shape[0])]
        moving = self.variables.constant(f"moving_{name}", shape, start, trainable=False)
        update = moving.assign_sub((moving - statistic) * (1.0 - _MOMENTUM))
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, update)


def classifier(
    network: type[Layers],
    image: int,
    batch: int,
    classes: int,
    *,
    images: Feed | None = None,
    labels: Feed | None = None,
    optimizer_name: str = "sgd",
    learning_rate: float = 0.01,
    seed: int = 0,
    device: str | None = None,
    **settings: Any,
) -> TrainingGraph:
    """Build the training graph of a classifier of square colour images.

    Args:
        network: its layers; ``apply(x, classes=, **settings)`` returns the logits.
        image: edge of the images in pixels.
        batch: images per step (static in the graph).
        classes: number of labels.
        images: float32 ``[batch, image, image, 3]``, or a function from the step's number to
            that; default noise made from ``seed``.
        labels: int32 ``[batch]``, likewise.
        optimizer_name: ``"sgd"``, ``"momentum"`` or ``"adam"``.
        learning_rate: of the optimizer.
        seed: of weights and default data.
        device: where everything is placed; None leaves it to TensorFlow.
        settings: for the network.

    Raises:
        ConfigError: only one of ``images`` and ``labels`` is given.
    """
    import tensorflow as tf

    if (images is None) != (labels is None):
        raise ConfigError("give images and labels, or neither of them")
    if images is None or labels is None:
        random = np.random.RandomState(seed)
        images = random.randn(batch, image, image, 3).astype(np.float32)
        labels = random.randint(0, classes, [batch]).astype(np.int32)
    with new_graph(device) as graph:
        x = tf.compat.v1.placeholder(tf.float32, [batch, image, image, 3], name="image")
        y = tf.compat.v1.placeholder(tf.int32, [batch], name="label")
        layers: Any = network(Variables(seed))
        logits = layers.apply(x, classes=classes, **settings)
        example_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = tf.reduce_mean(example_loss, name="loss")
        train_op = optimizer(optimizer_name, learning_rate)(loss)
        init_op = tf.compat.v1.global_variables_initializer()
    feeds = {x: images, y: labels}
    return TrainingGraph(graph, loss, train_op, init_op, feeds, logits, tuple(layers.activations))


def checked_depth(depth: int) -> int:
    """Return the bottlenecks a stage of a ResNet for small images with so many layers.

    Raises:
        ConfigError: the depth is not ``9 n + 2``.
    """
    blocks, rest = divmod(depth - 2, 9)
    if blocks < 1 or rest:
        near = 9 * max(blocks, 1) + 2
        raise ConfigError(f"depth is {depth}; it must be 9 n + 2, for example {near} or {near + 9}")
    return blocks
