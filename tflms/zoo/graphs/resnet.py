"""Residual networks (He et al. 2016) with training-mode batch normalization, as training graphs."""

from __future__ import annotations

from typing import Any

from tflms.zoo.graphs.layers import Layers, checked_depth, classifier
from tflms.zoo.graphs.training import Feed, TrainingGraph

STAGES_OF_RESNET50 = (3, 4, 6, 3)  # bottlenecks per stage (He et al. 2016, table 1)
_STAGES_OF_RESNET18 = (2, 2, 2, 2)  # blocks of two 3x3 convolutions


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
    return classifier(
        _Bottlenecks, image, batch, classes, width=width, stages=stages, images=images,
        labels=labels, optimizer_name=optimizer_name, learning_rate=learning_rate, seed=seed,
        device=device,
    )  # fmt: skip


def resnet18(
    image: int = 112, batch: int = 32, *, classes: int = 1000, width: int = 64, **settings: Any
) -> TrainingGraph:
    """Build ResNet-18 for colour images: stem, eight blocks of two 3x3 convolutions, pooled head.

    Args:
        image: edge of the square image in pixels.
        batch: images per step (static in the graph).
        classes: number of labels.
        width: channels of the stem; 64 in the paper.
        settings: as of ``resnet50``: data, optimizer, seed, device.
    """
    return classifier(
        _BasicBlocks, image, batch, classes, width=width, stages=_STAGES_OF_RESNET18, **settings
    )


def deep_resnet(
    depth: int = 164,
    image: int = 32,
    batch: int = 16,
    *,
    filters: int = 16,
    classes: int = 10,
    **settings: Any,
) -> TrainingGraph:
    """Build a pre-activation ResNet for small images (He et al. 2016, "Identity mappings").

    Three stages of ``(depth - 2) / 9`` bottlenecks each; the paper's deepest has 1001 layers.

    Args:
        depth: number of convolutions and the dense layer; ``9 n + 2``, such as 164 or 1001.
        image: edge of the square image in pixels.
        batch: images per step (static in the graph).
        filters: channels inside a bottleneck of the first stage; it puts out four times as many.
        classes: number of labels.
        settings: as of ``resnet50``: data, optimizer, seed, device.

    Raises:
        ConfigError: the depth is not ``9 n + 2``.
    """
    blocks = checked_depth(depth)
    return classifier(
        _Preactivated, image, batch, classes, filters=filters, blocks=blocks, **settings
    )


class _Bottlenecks(Layers):
    """Stem, stages of blocks, head; ``block`` is a bottleneck here."""

    expansion = 4

    def apply(self, x: Any, *, width: int, stages: tuple[int, ...], classes: int) -> Any:
        import tensorflow as tf

        x = self.conv_norm(x, width, edge=7, stride=2, name="stem")
        x = self.kept(tf.nn.relu(x))
        x = self.kept(tf.nn.max_pool2d(x, 3, 2, "SAME", name="pool"))
        for stage, count in enumerate(stages):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                with tf.compat.v1.variable_scope(f"stage{stage}_block{block}"):
                    x = self.block(x, width << stage, stride=stride)
        return self.pooled_head(x, classes)

    def block(self, x: Any, channels: int, *, stride: int) -> Any:
        """1x1, 3x3, 1x1 to four times the channels, added to the input or its projection."""
        import tensorflow as tf

        shortcut = self.shortcut(x, channels, stride=stride)
        # The stride sits in the 3x3 convolution, as in today's implementations ("v1.5").
        y = self.conv_norm(x, channels, edge=1, stride=1, name="a")
        y = self.kept(tf.nn.relu(y))
        y = self.conv_norm(y, channels, edge=3, stride=stride, name="b")
        y = self.kept(tf.nn.relu(y))
        y = self.conv_norm(y, 4 * channels, edge=1, stride=1, name="c")
        return self.kept(tf.nn.relu(y + shortcut))

    def shortcut(self, x: Any, channels: int, *, stride: int) -> Any:
        """The block's input, projected where the number of channels changes."""
        out = self.expansion * channels
        if int(x.shape[-1]) == out:
            return x
        return self.conv_norm(x, out, edge=1, stride=stride, name="project")


class _BasicBlocks(_Bottlenecks):
    """The same with two 3x3 convolutions in a block."""

    expansion = 1

    def block(self, x: Any, channels: int, *, stride: int) -> Any:
        """3x3, 3x3, added to the input or its projection."""
        import tensorflow as tf

        shortcut = self.shortcut(x, channels, stride=stride)
        y = self.conv_norm(x, channels, edge=3, stride=stride, name="a")
        y = self.kept(tf.nn.relu(y))
        y = self.conv_norm(y, channels, edge=3, stride=1, name="b")
        return self.kept(tf.nn.relu(y + shortcut))


class _Preactivated(Layers):
    """Bottlenecks that normalize before each convolution and leave the sum alone."""

    def apply(self, x: Any, *, filters: int, blocks: int, classes: int) -> Any:
        import tensorflow as tf

        with tf.compat.v1.variable_scope("stem"):
            x = self.conv(x, filters, edge=3)
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                with tf.compat.v1.variable_scope(f"stage{stage}_block{block}"):
                    x = self._block(x, filters << stage, stride=stride)
        with tf.compat.v1.variable_scope("last"):
            x = self.kept(tf.nn.relu(self.norm(x)))
        return self.pooled_head(x, classes)

    def _block(self, x: Any, channels: int, *, stride: int) -> Any:
        import tensorflow as tf

        scope = tf.compat.v1.variable_scope
        with scope("a"):
            y = self.kept(tf.nn.relu(self.norm(x)))
        # Where the shape changes, the projection shares the first normalization (section 4.1).
        shortcut = x
        if stride != 1 or int(x.shape[-1]) != 4 * channels:
            with scope("project"):
                shortcut = self.conv(y, 4 * channels, edge=1, stride=stride)
        with scope("a_conv"):
            y = self.conv(y, channels, edge=1)
        y = self.norm_relu_conv(y, channels, edge=3, stride=stride, name="b")
        y = self.norm_relu_conv(y, 4 * channels, edge=1, name="c")
        return self.kept(y + shortcut)
