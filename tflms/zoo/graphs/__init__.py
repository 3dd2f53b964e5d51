"""Training graphs for ``tf.compat.v1`` sessions, each built in a ``tf.Graph`` of its own."""

from __future__ import annotations

from tflms.zoo.graphs.mlp import mlp
from tflms.zoo.graphs.resnet import resnet50
from tflms.zoo.graphs.training import TrainingGraph
from tflms.zoo.graphs.unet3d import unet3d

__all__ = ["TrainingGraph", "mlp", "resnet50", "unet3d"]
