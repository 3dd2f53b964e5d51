"""The 3D U-Net (Çiçek et al. 2016) as a training graph: volumes whose skips live all step long."""

from __future__ import annotations

from typing import Any

import numpy as np

from tflms.errors import ConfigError
from tflms.zoo.graphs.training import Array, Feed, TrainingGraph, Variables, new_graph, optimizer


def unet3d(
    size: int = 64,
    filters: int = 8,
    *,
    levels: int = 4,
    batch: int = 1,
    classes: int = 3,
    images: Feed | None = None,
    labels: Feed | None = None,
    normalize: bool = False,
    optimizer_name: str = "adam",
    learning_rate: float = 3e-4,
    seed: int = 0,
    device: str | None = None,
) -> TrainingGraph:
    """Build a 3D U-Net that labels each voxel of a one-channel volume.

    Every level has two 3x3x3 convolutions with ReLU on the way down and two on the way up, and
    its output on the way down is concatenated to its input on the way up. As in the paper, a
    level's second convolution doubles the channels before max-pooling halves the volume (section
    2); the 2x2x2 transposed convolution that doubles the volume again halves the channels, as in
    the 2D U-Net (Ronneberger et al. 2015). The loss is the mean cross-entropy over the voxels.

    Args:
        size: edge of the cubic volume in voxels, a multiple of ``2 ** (levels - 1)``.
        filters: channels of the first convolution.
        levels: number of resolutions.
        batch: volumes per step (static in the graph).
        classes: number of labels.
        images: float32 ``[batch, size, size, size, 1]``, or a function from the step's number to
            that; default a smooth volume made from ``seed``.
        labels: int32 ``[batch, size, size, size]``, likewise; default made with the images.
        normalize: adds batch normalization (training mode) before each ReLU.
        optimizer_name: ``"adam"``, ``"momentum"`` or ``"sgd"``.
        learning_rate: of the optimizer.
        seed: of weights and default data.
        device: where everything is placed; None leaves it to TensorFlow.

    Raises:
        ConfigError: the size cannot be halved ``levels - 1`` times, or only one of ``images`` and
            ``labels`` is given.
    """
    import tensorflow as tf

    if levels < 1 or size % 2 ** (levels - 1):
        raise ConfigError(
            f"a 3D U-Net of {levels} levels halves its volume {levels - 1} times, which a size of "
            f"{size} does not allow; use a multiple of {2 ** max(levels - 1, 0)}"
        )
    if (images is None) != (labels is None):
        raise ConfigError("give images and labels, or neither of them")
    if images is None or labels is None:
        images, labels = _blobs(size, batch=batch, classes=classes, seed=seed)
    with new_graph(device) as graph:
        x = tf.compat.v1.placeholder(tf.float32, [batch, size, size, size, 1], name="image")
        y = tf.compat.v1.placeholder(tf.int32, [batch, size, size, size], name="label")
        network = _Network(Variables(seed), normalize=normalize)
        logits = network.apply(x, filters=filters, levels=levels, classes=classes)
        voxel_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = tf.reduce_mean(voxel_loss, name="loss")
        train_op = optimizer(optimizer_name, learning_rate)(loss)
        init_op = tf.compat.v1.global_variables_initializer()
    feeds = {x: images, y: labels}
    return TrainingGraph(graph, loss, train_op, init_op, feeds, logits, tuple(network.activations))


class _Network:
    """The layers of one U-Net, and the activations that they have made so far."""

    def __init__(self, variables: Variables, *, normalize: bool) -> None:
        self.activations: list[Any] = []
        self._variables = variables
        self._normalize = normalize

    def apply(self, x: Any, *, filters: int, levels: int, classes: int) -> Any:
        import tensorflow as tf

        skips = []
        for level in range(levels):
            x = self._conv(x, filters << level, name=f"down{level}a")
            x = self._conv(x, filters << level + 1, name=f"down{level}b")
            if level < levels - 1:
                skips.append(x)
                x = tf.nn.max_pool3d(x, 2, 2, "VALID", name=f"pool{level}")
        for level in reversed(range(levels - 1)):
            x = self._double(x, filters << level + 1, name=f"double{level}")
            x = tf.concat([skips[level], x], axis=-1, name=f"join{level}")
            self.activations.append(x)
            x = self._conv(x, filters << level + 1, name=f"up{level}a")
            x = self._conv(x, filters << level + 1, name=f"up{level}b")
        with tf.compat.v1.variable_scope("head"):
            kernel = self._variables.kernel("kernel", [1, 1, 1, int(x.shape[-1]), classes])
            bias = self._variables.constant("bias", [classes], 0.0)
            return tf.nn.bias_add(tf.nn.conv3d(x, kernel, [1] * 5, "SAME"), bias)

    def _conv(self, x: Any, channels: int, *, name: str) -> Any:
        import tensorflow as tf

        with tf.compat.v1.variable_scope(name):
            kernel = self._variables.kernel("kernel", [3, 3, 3, int(x.shape[-1]), channels])
            x = tf.nn.conv3d(x, kernel, [1] * 5, "SAME")
            x = tf.nn.bias_add(x, self._variables.constant("bias", [channels], 0.0))
            if self._normalize:
                x = self._batch_norm(x, channels)
            x = tf.nn.relu(x)
        self.activations.append(x)
        return x

    def _batch_norm(self, x: Any, channels: int) -> Any:
        import tensorflow as tf

        scale = self._variables.constant("scale", [channels], 1.0)
        offset = self._variables.constant("offset", [channels], 0.0)
        normal, _, _ = tf.compat.v1.nn.fused_batch_norm(
            x, scale, offset, is_training=True, data_format="NDHWC"
        )
        return normal

    def _double(self, x: Any, channels: int, *, name: str) -> Any:
        import tensorflow as tf

        batch, *edges, depth = (int(extent) for extent in x.shape)
        with tf.compat.v1.variable_scope(name):
            kernel = self._variables.kernel("kernel", [2, 2, 2, channels, depth])
            shape = [batch, *(2 * edge for edge in edges), channels]
            x = tf.nn.conv3d_transpose(x, kernel, shape, [1, 2, 2, 2, 1], "SAME")
            return tf.nn.bias_add(x, self._variables.constant("bias", [channels], 0.0))


def _blobs(size: int, *, batch: int, classes: int, seed: int) -> tuple[Array, Array]:
    """Return smooth volumes with noise, and as labels the bands of their smooth part."""
    random = np.random.RandomState(seed)
    axis = np.linspace(0.0, 2.0 * np.pi, size, endpoint=False)
    smooth = np.zeros([batch, size, size, size])
    for i in range(batch):
        for _ in range(4):
            waves = [np.sin(random.randint(1, 4) * axis + random.uniform(0, 6)) for _ in range(3)]
            smooth[i] += np.einsum("i,j,k->ijk", *waves)
    edges = np.quantile(smooth, np.linspace(0.0, 1.0, classes + 1)[1:-1])
    noise = 0.3 * random.randn(*smooth.shape)
    images = (smooth + noise)[..., None].astype(np.float32)
    return images, np.digitize(smooth, edges).astype(np.int32)
