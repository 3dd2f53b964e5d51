"""Counts the floating-point operations of contractions (products, convolutions) in a traced graph.

A multiply and an add count as two. Element-wise operations are left out, as in the cost figures of
the paper on local parallelism (arXiv 2012.03837); their share is below a percent in wide networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any


def _shape(tensor: Any) -> list[int]:
    """Return the static shape; an unknown dimension counts as one."""
    if tensor.shape.rank is None:
        return []
    return [1 if size is None else size for size in tensor.shape.as_list()]


def _matmul(op: Any) -> int:
    left, out = _shape(op.inputs[0]), _shape(op.outputs[0])
    transposed = op.get_attr("transpose_a") if op.type == "MatMul" else op.get_attr("adj_x")
    inner = left[-2] if transposed else left[-1]
    return 2 * prod(out) * inner


def _convolution(op: Any) -> int:
    """Each output value takes one product per kernel position and input channel."""
    kernel = _shape(op.inputs[1])
    return 2 * prod(_shape(op.outputs[0])) * prod(kernel[:-1])


def _depthwise(op: Any) -> int:
    kernel = _shape(op.inputs[1])
    return 2 * prod(_shape(op.outputs[0])) * prod(kernel[:2])


def _static_sizes(tensor: Any) -> list[int] | None:
    import tensorflow as tf

    value = tf.get_static_value(tensor)
    return None if value is None else [int(size) for size in value]


def _convolution_to_input(op: Any) -> int:
    """The gradient for the input costs as much as the forward convolution."""
    kernel = _shape(op.inputs[1])
    return 2 * prod(_shape(op.inputs[2])) * prod(kernel[:-1])


def _convolution_to_kernel(op: Any) -> int:
    sizes = _static_sizes(op.inputs[1]) or _shape(op.outputs[0])
    return 2 * prod(_shape(op.inputs[2])) * prod(sizes[:-1])


def _depthwise_to_input(op: Any) -> int:
    return 2 * prod(_shape(op.inputs[2])) * prod(_shape(op.inputs[1])[:2])


def _depthwise_to_kernel(op: Any) -> int:
    sizes = _static_sizes(op.inputs[1]) or _shape(op.outputs[0])
    return 2 * prod(_shape(op.inputs[2])) * prod(sizes[:2])


def _einsum(op: Any) -> int:
    equation = op.get_attr("equation").decode()
    terms = equation.split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, op.inputs, strict=True):
        shape = _shape(tensor)
        labels = term.replace("...", "")
        for axis, label in enumerate(labels if "..." not in term else []):
            sizes[label] = shape[axis]
        if "..." in term:
            head, tail = term.split("...")
            sizes.update(zip(head, shape[: len(head)], strict=True))
            sizes.update(zip(tail, shape[len(shape) - len(tail) :], strict=True))
            sizes["..."] = prod(shape[len(head) : len(shape) - len(tail)])
    return (2 if len(terms) > 1 else 0) * prod(sizes.values())


_COUNTERS: dict[str, Callable[[Any], int]] = {
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "Conv2DBackpropInput": _convolution_to_input,
    "Conv3DBackpropInputV2": _convolution_to_input,
    "Conv2DBackpropFilter": _convolution_to_kernel,
    "Conv3DBackpropFilterV2": _convolution_to_kernel,
    "DepthwiseConv2dNative": _depthwise,
    "DepthwiseConv2dNativeBackpropInput": _depthwise_to_input,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_to_kernel,
    "Einsum": _einsum,
}


def live_operations(graph: Any) -> list[Any]:
    """Return the operations of a function's graph that its results or effects need.

    TensorFlow prunes the others before it runs: a tape traces more products than it uses.
    """
    waiting = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    seen: set[int] = set()
    while waiting:
        op = waiting.pop()
        if id(op) not in seen:
            seen.add(id(op))
            waiting.extend(tensor.op for tensor in op.inputs)
            waiting.extend(op.control_inputs)
    return [op for op in graph.get_operations() if id(op) in seen]


def flops_of(operations: Iterable[Any]) -> int:
    """Return the operations of the contractions among the graph operations, 2 a multiply-add.

    Function calls inside the graph are followed once; the body of a loop counts once.
    """
    total = 0
    for op in operations:
        counter = _COUNTERS.get(op.type)
        if counter is not None:
            total += counter(op)
        elif op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            body = op.graph._get_function(op.get_attr("f").name)
            if body is not None and getattr(body, "graph", None) is not None:
                total += flops_of(live_operations(body.graph))
    return total
