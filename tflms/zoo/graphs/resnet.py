"""ResNet-50 (He et al. 2016) with training-mode batch normalization, as a training graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from tflms.errors import ConfigError
from tflms.zoo.graphs.training import Feed, TrainingGraph, Variables, new_graph, optimizer

STAGES_OF_RESNET50 = (3, 4, 6, 3)  # bottlenecks per stage (He et al. 2016, table 1)
_MOMENTUM = 0.9  # of the moving statistics
_EPSILON = 1e-5  # of batch normalization, as in the paper's released models


def resnet50(
    image: int = 112,
    batch: int = 32,
    *,
    classes: int = 1000,
    width: int = 64,
    stages: tuple[int, ...] = STAGES_OF_RESNET50,
    images: Feed | None = None,
    labels: Feed | None = None,
    optimizer_name: str = "sgd",
    learning_rate: float = 0.01,
    seed: int = 0,
    device: str | None = None,
) -> TrainingGraph:
    """Build ResNet-50 for colour images: stem, 16 bottlenecks in four stages, pooled head.

    Args:
        image: edge of the square image in pixels.
        batch: images per step (static in the graph).
        classes: number of labels.
        width: channels of the stem; 64 in the paper, smaller for quick tests.
        stages: bottlenecks per stage; ``(3, 4, 23, 3)`` gives ResNet-101.
        images: float32 ``[batch, image, image, 3]``, or a function from the step's number to
            that; default noise made from ``seed``.
        labels: int32 ``[batch]``, likewise.
        optimizer_name: ``"sgd"``, ``"momentum"`` or ``"adam"``.
        learning_rate: of the optimizer.
        seed: of weights and default data.
        device: where everything is placed; None leaves it to TensorFlow.

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
        network = _Network(Variables(seed))
        logits = network.apply(x, width=width, stages=stages, classes=classes)
        example_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = tf.reduce_mean(example_loss, name="loss")
        train_op = optimizer(optimizer_name, learning_rate)(loss)
        init_op = tf.compat.v1.global_variables_initializer()
    feeds = {x: images, y: labels}
    return TrainingGraph(graph, loss, train_op, init_op, feeds, logits, tuple(network.activations))


class _Network:
    """The layers of one ResNet, and the activations that they have made so far."""

    def __init__(self, variables: Variables) -> None:
        self.activations: list[Any] = []
        self._variables = variables

    def apply(self, x: Any, *, width: int, stages: tuple[int, ...], classes: int) -> Any:
        import tensorflow as tf

        x = self._conv_norm(x, width, edge=7, stride=2, name="stem")
        x = self._kept(tf.nn.relu(x))
        x = self._kept(tf.nn.max_pool2d(x, 3, 2, "SAME", name="pool"))
        for stage, count in enumerate(stages):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                with tf.compat.v1.variable_scope(f"stage{stage}_block{block}"):
                    x = self._bottleneck(x, width << stage, stride=stride)
        x = tf.reduce_mean(x, axis=[1, 2])
        with tf.compat.v1.variable_scope("head"):
            features = int(x.shape[-1])
            kernel = self._variables.normal("kernel", [features, classes], stddev=0.01)
            bias = self._variables.constant("bias", [classes], 0.0)
            return tf.nn.bias_add(tf.matmul(x, kernel), bias)

    def _bottleneck(self, x: Any, channels: int, *, stride: int) -> Any:
        """1x1, 3x3, 1x1 to four times the channels, added to the input or its projection."""
        import tensorflow as tf

        shortcut = x
        if int(x.shape[-1]) != 4 * channels:
            shortcut = self._conv_norm(x, 4 * channels, edge=1, stride=stride, name="project")
        # The stride sits in the 3x3 convolution, as in today's implementations ("v1.5").
        y = self._conv_norm(x, channels, edge=1, stride=1, name="a")
        y = self._kept(tf.nn.relu(y))
        y = self._conv_norm(y, channels, edge=3, stride=stride, name="b")
        y = self._kept(tf.nn.relu(y))
        y = self._conv_norm(y, 4 * channels, edge=1, stride=1, name="c")
        return self._kept(tf.nn.relu(y + shortcut))

    def _kept(self, x: Any) -> Any:
        self.activations.append(x)
        return x

    def _conv_norm(self, x: Any, channels: int, *, edge: int, stride: int, name: str) -> Any:
        import tensorflow as tf

        with tf.compat.v1.variable_scope(name):
            kernel = self._variables.kernel("kernel", [edge, edge, int(x.shape[-1]), channels])
            x = self._kept(tf.nn.conv2d(x, kernel, stride, "SAME"))
            scale = self._variables.constant("scale", [channels], 1.0)
            offset = self._variables.constant("offset", [channels], 0.0)
            normal, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                x, scale, offset, epsilon=_EPSILON, is_training=True
            )
            self._track("mean", mean, start=0.0)
            self._track("variance", variance, start=1.0)
            return normal

    def _track(self, name: str, statistic: Any, *, start: float) -> None:
        """Keep a moving average of a batch statistic; the train op waits for its update."""
        import tensorflow as tf

        shape = [int(statistic.shape[0])]
        moving = self._variables.constant(f"moving_{name}", shape, start, trainable=False)
        update = moving.assign_sub((moving - statistic) * (1.0 - _MOMENTUM))
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, update)
