"""Makes a copy of a training graph that runs in a session of its own, with made-up data.

A rewrite is not given a batch, and while a function is traced its variables may not exist yet.
What operations take does not depend on the numbers, only on their shapes; so floating point inputs
are noise, whole numbers are zeros (valid as labels, tokens and indices of any size), and variables
start with small positive numbers (valid as weights and as an optimizer's second moments).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import handle_data_util

from tflms.errors import ConfigError
from tflms.graph.order import Phases
from tflms.runtime import survival
from tflms.runtime.read import ReadGraph

_SCOPE = "tflms_rehearsal"
_OTHERWISE = "cost='static' estimates the times instead, or cost= takes a file of measured costs"
_LARGEST_START = 0.1


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A copy of a step; its operations have the names that they have in the user's graph.

    Attributes:
        graph: a ``tf.Graph``.
        feeds: made-up inputs, by placeholder.
        init: the operation that gives the variables their values.
        fetches: the operations that make up a step.
    """

    graph: Any
    feeds: Mapping[Any, Any]
    init: Any
    fetches: list[Any]


def rehearse(read: ReadGraph, phases: Phases, batch_size: int | None) -> Rehearsal:
    """Copy a step; the user's graph is only looked at.

    Args:
        read: the user's graph, of a session or of a function.
        phases: which operations a step runs.
        batch_size: what an unknown leading dimension stands for.

    Raises:
        ConfigError: an input's shape is not known, its type cannot be made up, or the step uses a
            resource that is no variable.
    """
    graph = tf.Graph()
    feeds: dict[Any, Any] = {}
    replaced: dict[str, Any] = {}
    random = np.random.RandomState(0)
    scope = context.context().device_name  # where a function's operations go that name no device
    with graph.as_default(), tf.device(scope or None):
        with tf.name_scope(f"{_SCOPE}/"):
            for tf_op in read.tf_graph.get_operations():
                op = read.op_id(tf_op) if tf_op.type == "Placeholder" else None
                if op is None or not phases.step[op]:
                    continue
                tensor = tf_op.outputs[0]
                if tensor.dtype == tf.resource:
                    replaced[tensor.name] = _variable(tensor)
                    continue
                value = _made_up(tensor, batch_size, random)
                fed = tf.compat.v1.placeholder(tensor.dtype, value.shape)
                feeds[fed] = value
                replaced[tensor.name] = fed
        definition = read.tf_graph.as_graph_def()
        tf.graph_util.import_graph_def(definition, input_map=replaced, name="")
        init = tf.group(*_starts(graph))
    fetches = [graph.get_operation_by_name(name) for name in survival.targets_of(read, phases)]
    return Rehearsal(graph, feeds, init, fetches)


def _variable(tensor: Any) -> Any:
    """Return the handle of a new variable like the one that a placeholder stands for."""
    data = handle_data_util.get_resource_handle_data(tensor)
    parts = list(data.shape_and_type) if data is not None and data.is_set else []
    shape = tf.TensorShape(parts[0].shape) if len(parts) == 1 else tf.TensorShape(None)
    if not shape.is_fully_defined():
        raise ConfigError(
            f"cost='measured' cannot run this step apart: {tensor.op.name!r} is a resource that "
            f"is no variable of known shape; {_OTHERWISE}"
        )
    return tf.raw_ops.VarHandleOp(
        dtype=tf.as_dtype(parts[0].dtype), shape=shape, shared_name=f"{_SCOPE}/{tensor.op.name}"
    )


def _made_up(tensor: Any, batch_size: int | None, random: Any) -> Any:
    shape = None if tensor.shape.rank is None else list(tensor.shape)
    if shape and shape[0] is None:
        shape[0] = batch_size
    if shape is None or None in shape:
        raise ConfigError(
            f"cost='measured' needs the shape of the input {tensor.op.name!r}, which is "
            f"{tensor.shape}; set batch_size, or give the placeholder its shape; {_OTHERWISE}"
        )
    kind = tensor.dtype
    if kind.is_floating or kind.is_complex:
        return random.standard_normal(shape).astype(kind.as_numpy_dtype)
    if kind.is_integer or kind.is_bool:
        return np.zeros(shape, kind.as_numpy_dtype)
    raise ConfigError(
        f"cost='measured' cannot make up an input of type {kind.name} for {tensor.op.name!r}; "
        f"{_OTHERWISE}"
    )


def _starts(graph: Any) -> list[Any]:
    """Operations that give each variable of a graph a value, on its own device."""
    made: list[Any] = []
    for op in graph.get_operations():
        if op.type not in ("VarHandleOp", "VariableV2", "Variable"):
            continue
        shape = tf.TensorShape(op.get_attr("shape"))
        if not shape.is_fully_defined():
            continue
        with tf.device(op.device or None):
            value = _small(tf.as_dtype(op.get_attr("dtype")), shape)
            if op.type == "VarHandleOp":
                made.append(tf.raw_ops.AssignVariableOp(resource=op.outputs[0], value=value))
            else:
                made.append(tf.raw_ops.Assign(ref=op.outputs[0], value=value).op)
    return made


def _small(dtype: Any, shape: Any) -> Any:
    if not dtype.is_floating:
        return tf.zeros(shape, dtype)
    return tf.cast(tf.random.uniform(shape, 0.0, _LARGEST_START, seed=1), dtype)
