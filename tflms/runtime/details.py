"""Notes in the IR what only TensorFlow's own objects tell and a prediction of memory needs.

Arguments of a function are held by its caller for the whole call. A transposition that moves only
dimensions of length one hands on its input's buffer (``transpose_op.cc``). Constants that are equal
become one when TensorFlow's optimizers have folded and merged them, which they do where the
colocation is the same, too (``common_subgraph_elimination.cc`` compares all attributes).
"""

from __future__ import annotations

import hashlib
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from tflms.graph import effects
from tflms.graph.ir import Graph, OpId
from tflms.runtime.read import ReadGraph

_NOTICEABLE_NBYTES = 16 * 1024  # smaller constants are not compared


def note(read: ReadGraph) -> None:
    """Set ``attrs`` of the user's operations: ``argument``, ``moves_nothing`` and ``equal_to``."""
    graph = read.graph
    in_function = isinstance(read.tf_graph, FuncGraph)
    constant = bytearray(graph.size)
    large: list[OpId] = []
    for op in graph.ops():
        if op.type == "Const":
            constant[op.id] = True
        elif op.type == "Placeholder":
            if in_function:
                op.attrs["argument"] = True
            continue
        elif not op.inputs or not effects.of(op.type).pure:
            continue
        elif all(constant[graph.value(v).op] for v in op.inputs):
            constant[op.id] = True
        elif op.type == "Transpose":
            if _moves_nothing(graph, read.tf_ops, op.id):
                op.attrs["moves_nothing"] = True
            continue
        else:
            continue
        if any((graph.value(v).nbytes(1) or 0) >= _NOTICEABLE_NBYTES for v in op.outputs):
            large.append(op.id)
    _compare(graph, read.tf_ops, large)


def _moves_nothing(graph: Graph, tf_ops: list[Any], op_id: OpId) -> bool:
    """Tell whether dimensions that are longer than one keep their order."""
    shape = graph.value(graph.op(op_id).inputs[0]).shape
    if shape is None:
        return False
    turned = _whole_numbers(tf_ops[op_id].inputs[1])
    return turned is not None and sorted(moved := [d for d in turned if shape[d] != 1]) == moved


def _whole_numbers(tensor: Any) -> list[int] | None:
    """Return a vector of dimensions; gradients put it together from pieces, some of them empty."""
    if tensor.shape == [0]:
        return []
    if tensor.op.type == "ConcatV2":
        parts = [_whole_numbers(part) for part in tensor.op.inputs[:-1]]
        return None if None in parts else [d for part in parts if part for d in part]
    known = tf.get_static_value(tensor)
    return None if known is None else [int(d) for d in known]


def _compare(graph: Graph, tf_ops: list[Any], large: list[OpId]) -> None:
    """Let equal constants name the first of them; they are merged where they are colocated."""
    digests: dict[OpId, bytes] = {}
    first: dict[tuple[bytes, tuple[str, ...]], OpId] = {}
    for op_id in large:
        alike = (_digest(graph, tf_ops, op_id, digests), graph.op(op_id).colocation)
        chosen = first.setdefault(alike, op_id)
        if chosen != op_id:
            graph.op(op_id).attrs["equal_to"] = chosen


def _digest(graph: Graph, tf_ops: list[Any], wanted: OpId, digests: dict[OpId, bytes]) -> bytes:
    """Hash an operation with all that it is computed from; names and devices do not count."""
    work = [wanted]
    while work:
        op_id = work[-1]
        sources = [graph.value(v) for v in graph.op(op_id).inputs]
        if missing := [v.op for v in sources if v.op not in digests]:
            work += missing
            continue
        work.pop()
        attributes = tf_ops[op_id].node_def.attr
        digest = hashlib.sha256(graph.op(op_id).type.encode())
        for key in sorted(key for key in attributes if not key.startswith("_")):
            digest.update(key.encode() + attributes[key].SerializeToString(deterministic=True))
        for value in sources:
            digest.update(digests[value.op] + bytes([value.index]))
        digests[op_id] = digest.digest()
    return digests[wanted]
