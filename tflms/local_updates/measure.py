"""Measures a network without running it: FLOPs and kept bytes of each layer, from one trace."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from math import prod
from typing import Any

import keras
import tensorflow as tf

from tflms.errors import ConfigError
from tflms.local_updates.flops import flops_of
from tflms.local_updates.network import Network

_VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "Snapshot"})
_WEIGHTLESS = frozenset({"ReadVariableOp", "Const", "Placeholder", "Shape", "Size", "Rank"})


@dataclass(frozen=True, slots=True)
class Measures:
    """What one trace says about each vertex of a network.

    Attributes:
        batch_size: the batch size of the trace.
        flops: per vertex, forward FLOPs of the whole batch.
        saved_bytes: per vertex, bytes made in the forward pass that the backward pass reads.
    """

    batch_size: int
    flops: tuple[int, ...]
    saved_bytes: tuple[int, ...]


def tensor_bytes(tensor: Any, *, batch_size: int) -> int:
    """Return the bytes of a symbolic tensor when an unknown leading size is the batch size."""
    shape = list(tensor.shape)
    if shape and shape[0] is None:
        shape[0] = batch_size
    return prod(1 if size is None else size for size in shape) * dtype_bytes(tensor.dtype)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one value of a Keras dtype."""
    size: int = tf.as_dtype(keras.backend.standardize_dtype(dtype)).size
    return size


def input_specs(network: Network, *, batch_size: int) -> list[tf.TensorSpec]:
    """Return the specs of the network's inputs with the batch size filled in.

    Raises:
        ConfigError: a dimension other than the first is unknown.
    """
    specs = []
    for tensor in network.model.inputs:
        shape = list(tensor.shape)
        if shape and shape[0] is None:
            shape[0] = batch_size
        if None in shape:
            raise ConfigError(
                f"input {tensor.name!r} has shape {tuple(tensor.shape)}; sizes need all dimensions "
                "but the first: build the model with a fixed shape"
            )
        specs.append(tf.TensorSpec(shape, keras.backend.standardize_dtype(tensor.dtype)))
    return specs


def call_vertex(vertex: Any, known: dict[int, Any], *, training: bool) -> None:
    """Call one layer on the tensors known so far and add its results to them."""
    args, kwargs = vertex.node.arguments.fill_in(known)
    operation = vertex.node.operation
    if "training" in inspect.signature(operation.call).parameters:
        kwargs["training"] = training
    results = keras.tree.flatten(operation(*args, **kwargs))
    known.update(zip(vertex.outputs, results, strict=True))


def measure(network: Network, *, batch_size: int) -> Measures:
    """Trace the network once, layer by layer, with its backward pass, and count.

    Nothing is run and no variable changes.
    """
    ends: list[int] = []

    def step(*inputs: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        known = dict(zip(network.inputs, inputs, strict=True))
        with tf.GradientTape() as tape:
            for vertex in network.vertices:
                call_vertex(vertex, known, training=True)
                ends.append(len(graph.get_operations()))
            loss = tf.reduce_sum(tf.cast(known[network.output], tf.float32))
            ends.append(len(graph.get_operations()))
        variables = network.model.trainable_variables
        # Under a distribution strategy, outside a replica, reads go to the first copy.
        sources = [getattr(variable.value, "_primary", variable) for variable in variables]
        gradients = tape.gradient(loss, sources)
        return [gradient for gradient in gradients if gradient is not None]

    specs = input_specs(network, batch_size=batch_size)
    operations = tf.function(step, autograph=False).get_concrete_function(*specs)
    operations = operations.graph.get_operations()
    position = {id(op): index for index, op in enumerate(operations)}
    saved = [0] * (len(network.vertices) + 1)
    forward_end = ends[-1]
    counted: set[int] = set()
    for op in operations[forward_end:]:
        for tensor in op.inputs:
            source = _source(tensor)
            index = position[id(source.op)]
            if index >= forward_end or id(source) in counted or source.op.type in _WEIGHTLESS:
                continue
            counted.add(id(source))
            if source.dtype != tf.resource and source.shape.rank:
                owner = next(i for i, end in enumerate(ends) if index < end)
                saved[owner] += prod(source.shape.as_list()) * source.dtype.size
    starts = [0, *ends[:-2]]
    flops = [flops_of(operations[start:end]) for start, end in zip(starts, ends[:-1], strict=True)]
    return Measures(batch_size, tuple(flops), tuple(saved[:-1]))


def _source(tensor: Any) -> Any:
    """Return the tensor whose storage this one shows."""
    while tensor.op.type in _VIEWS and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return tensor
