"""DenseNet-121 (Huang et al. 2017) as a training graph: every layer reads all before it."""

from __future__ import annotations

from typing import Any

from tflms.zoo.graphs.layers import Layers, classifier
from tflms.zoo.graphs.training import TrainingGraph

_BLOCKS = (6, 12, 24, 16)  # layers per block (table 1)
_GROWTH = 32  # channels that a layer adds


def densenet121(
    image: int = 112,
    batch: int = 32,
    *,
    classes: int = 1000,
    growth: int = _GROWTH,
    **settings: Any,
) -> TrainingGraph:
    """Build DenseNet-121 for colour images: stem, four dense blocks, pooled head.

    Args:
        image: edge of the square image in pixels.
        batch: images per step (static in the graph).
        classes: number of labels.
        growth: channels that a layer adds; 32 in the paper.
        settings: as of ``resnet50``: data, optimizer, seed, device.
    """
    return classifier(_Network, image, batch, classes, growth=growth, **settings)


class _Network(Layers):
    def apply(self, x: Any, *, growth: int, classes: int) -> Any:
        import tensorflow as tf

        x = self.conv_norm(x, 2 * growth, edge=7, stride=2, name="stem")
        x = self.kept(tf.nn.relu(x))
        x = self.kept(tf.nn.max_pool2d(x, 3, 2, "SAME", name="pool"))
        for block, count in enumerate(_BLOCKS):
            for layer in range(count):
                with tf.compat.v1.variable_scope(f"block{block}_layer{layer}"):
                    # A bottleneck of four times the growth before each 3x3 convolution ("B").
                    y = self.norm_relu_conv(x, 4 * growth, edge=1, name="a")
                    y = self.norm_relu_conv(y, growth, edge=3, name="b")
                x = self.kept(tf.concat([x, y], axis=-1))
            if block < len(_BLOCKS) - 1:  # half of the channels, half of the edge ("C")
                half = int(x.shape[-1]) // 2
                x = self.norm_relu_conv(x, half, edge=1, name=f"transition{block}")
                x = self.kept(tf.nn.avg_pool2d(x, 2, 2, "SAME"))
        with tf.compat.v1.variable_scope("last"):
            x = self.kept(tf.nn.relu(self.norm(x)))
        return self.pooled_head(x, classes)
