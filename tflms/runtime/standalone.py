"""Lets the graph of a traced function run in a session of its own, on copies of its variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tflms.errors import ConfigError

_SCOPE = "tflms_standalone"


@dataclass(frozen=True, slots=True)
class Standalone:
    """A function's graph that a session can run; operations have the names they had.

    Attributes:
        graph: a ``tf.Graph``.
        feeds: what a step is fed, by placeholder.
        init: the operation that copies the variables; ``init_feeds`` are their values.
        init_feeds: values of the variables, by placeholder.
    """

    graph: Any
    feeds: Mapping[Any, Any]
    init: Any
    init_feeds: Mapping[Any, Any]

    def named(self, elements: Iterable[Any]) -> list[Any]:
        """Return the tensors and operations that correspond to some of the function's graph."""
        return [self.graph.as_graph_element(element.name) for element in elements]


def standalone(func_graph: Any, arguments: Sequence[Any]) -> Standalone:
    """Copy a function's graph into one that a session can run.

    The function's variables are copied with their values, so that a run changes nothing of the
    user's; what else it captures is fed.

    Args:
        func_graph: the graph of a traced function.
        arguments: tensors or arrays, one for each of its inputs that is no capture.

    Raises:
        ConfigError: the arguments do not fit, or the function uses a resource that is no variable.
    """
    captures = list(func_graph.captures)
    inputs = func_graph.inputs[: len(func_graph.inputs) - len(captures)]
    values = [tf.convert_to_tensor(argument).numpy() for argument in arguments]
    if len(values) != len(inputs):
        raise ConfigError(
            f"the function has {len(inputs)} tensors as inputs and was given {len(values)}; pass "
            "what a step is called with, as tensors or arrays"
        )
    held = [_value(outer, inner) for outer, inner in captures]
    graph = tf.Graph()
    feeds: dict[Any, Any] = {}
    init_feeds: dict[Any, Any] = {}
    replaced: dict[str, Any] = {}
    with graph.as_default(), tf.name_scope(f"{_SCOPE}/"):
        for inner, value in zip(inputs, values, strict=True):
            fed = tf.compat.v1.placeholder(inner.dtype, value.shape)
            feeds[fed] = value
            replaced[inner.name] = fed
        assigned = []
        for number, ((outer, inner), value) in enumerate(zip(captures, held, strict=True)):
            with tf.device(getattr(outer, "device", None)):
                start = tf.compat.v1.placeholder(value.dtype, value.shape)
                if outer.dtype != tf.resource:
                    feeds[start] = value
                    replaced[inner.name] = start
                    continue
                handle = tf.raw_ops.VarHandleOp(
                    dtype=value.dtype, shape=value.shape, shared_name=f"{_SCOPE}_{number}"
                )
                assigned.append(tf.raw_ops.AssignVariableOp(resource=handle, value=start))
                init_feeds[start] = value
                replaced[inner.name] = handle
        init = tf.group(*assigned)
    with graph.as_default():
        tf.graph_util.import_graph_def(func_graph.as_graph_def(), input_map=replaced, name="")
    return Standalone(graph, feeds, init, init_feeds)


def _value(outer: Any, inner: Any) -> Any:
    """Return what a capture holds, or the variable that it is the handle of."""
    if outer.dtype != tf.resource:
        return outer.numpy()
    data = getattr(outer, "_handle_data", None) or getattr(inner, "_handle_data", None)
    types = list(data.shape_and_type) if data is not None and data.is_set else []
    if len(types) != 1:
        raise ConfigError(
            f"{inner.name} is a resource that is no variable, which a session of its own cannot "
            "have; cost='static' estimates the times instead"
        )
    dtype = tf.as_dtype(types[0].dtype)
    return tf.raw_ops.ReadVariableOp(resource=outer, dtype=dtype).numpy()
