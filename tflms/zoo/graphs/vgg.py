"""VGG-16 (Simonyan and Zisserman 2015) as a training graph: a plain chain of few, large stages."""

from __future__ import annotations

from typing import Any

from tflms.zoo.graphs.layers import Layers, classifier
from tflms.zoo.graphs.training import TrainingGraph

_BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))  # convolutions and channels


def vgg16(
    image: int = 112, batch: int = 32, *, classes: int = 1000, **settings: Any
) -> TrainingGraph:
    """Build VGG-16 for colour images, with one dense layer behind the convolutions.

    The paper's dense layers would hold nine of ten weights, and nothing that can be recomputed.

    Args:
        image: edge of the square image in pixels.
        batch: images per step (static in the graph).
        classes: number of labels.
        settings: as of ``resnet50``: data, optimizer, seed, device.
    """
    return classifier(_Network, image, batch, classes, **settings)


class _Network(Layers):
    def apply(self, x: Any, *, classes: int) -> Any:
        import tensorflow as tf

        for block, (count, channels) in enumerate(_BLOCKS):
            for number in range(count):
                with tf.compat.v1.variable_scope(f"block{block}_{number}"):
                    x = self.conv(x, channels, edge=3)
                    bias = self.variables.constant("bias", [channels], 0.0)
                    x = self.kept(tf.nn.relu(tf.nn.bias_add(x, bias)))
            x = tf.nn.max_pool2d(x, 2, 2, "SAME")
        return self.pooled_head(x, classes)
