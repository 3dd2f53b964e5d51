"""Training graphs for ``tf.compat.v1`` sessions, each built in a ``tf.Graph`` of its own."""

from __future__ import annotations

from tflms.zoo.graphs.densenet import densenet121
from tflms.zoo.graphs.mlp import mlp
from tflms.zoo.graphs.resnet import deep_resnet, resnet18, resnet50
from tflms.zoo.graphs.training import TrainingGraph
from tflms.zoo.graphs.unet3d import unet3d
from tflms.zoo.graphs.vgg import vgg16

__all__ = [
    "TrainingGraph",
    "deep_resnet",
    "densenet121",
    "mlp",
    "resnet18",
    "resnet50",
    "unet3d",
    "vgg16",
]
