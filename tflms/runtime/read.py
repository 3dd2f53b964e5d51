"""Reads a ``tf.Graph`` (a ``FuncGraph`` too) into the IR; the graph itself is not touched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import handle_data_util

from tflms.errors import GraphError
from tflms.graph import slots
from tflms.graph.erase import Edges
from tflms.graph.ir import Graph, OpId, Shape, ValueId

_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint64": "u64", "uint32": "u32",
    "uint16": "u16", "uint8": "u8", "bool": "bool", "complex64": "c64", "complex128": "c128",
    "qint8": "q8", "quint8": "qu8", "qint16": "q16", "quint16": "qu16", "qint32": "q32",
    "int4": "i4", "uint4": "u4", "float8_e5m2": "f8", "float8_e4m3fn": "f8",
    "resource": "resource", "variant": "variant", "string": "string",
}  # fmt: skip


@dataclass(slots=True)
class ReadGraph:
    """A graph as read, and the way back to TensorFlow's own objects.

    Attributes:
        graph: the IR, sealed.
        tf_graph: the graph that was read.
        tf_ops: TensorFlow's operation by IR id; the operations of ``slots`` come behind them.
        slots: per operation that stands for one slot of an IdentityN, that and which slot.
    """

    graph: Graph
    tf_graph: Any
    tf_ops: list[Any] = field(default_factory=list)
    slots: dict[OpId, tuple[OpId, int]] = field(default_factory=dict)
    _slot_of: dict[tuple[OpId, int], OpId] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Know the slots by what they stand for, too."""
        self._slot_of = {place: slot for slot, place in self.slots.items()}

    def op_id(self, op: Any) -> OpId | None:
        """Return the IR id of one of TensorFlow's operations, or None."""
        found = self.graph.find(op.name)
        return found if found is not None and self.tf_ops[found] is op else None

    def value_id(self, tensor: Any) -> ValueId | None:
        """Return the IR id of one of TensorFlow's tensors, or None.

        An output of an IdentityN that is read slot by slot is the slot's value: what readers read.
        """
        op = self.op_id(tensor.op)
        if op is None:
            return None
        if (slot := self._slot_of.get((op, tensor.value_index))) is not None:
            return self.graph.op(slot).outputs[0]
        return self.graph.op(op).outputs[tensor.value_index]

    def tensor(self, value: ValueId) -> Any:
        """Return TensorFlow's tensor for a value of the user's graph."""
        v = self.graph.value(value)
        op, index = self.slots.get(v.op, (v.op, v.index))
        return self.tf_ops[op].outputs[index]

    def tf_name(self, op: OpId) -> str:
        """Return what TensorFlow calls a user's operation; a slot's is that of its IdentityN."""
        return self.graph.op(self.slots.get(op, (op, 0))[0]).name

    def original_edges(self) -> Edges:
        """Return the user's edges, taken from TensorFlow again and not from the IR."""
        inputs = [tuple(map(self.value_id, tf_op.inputs)) for tf_op in self.tf_ops]
        controls = [tuple(map(self.op_id, tf_op.control_inputs)) for tf_op in self.tf_ops]
        inputs += [(inputs[op][index],) for op, index in self.slots.values()]
        controls += [()] * len(self.slots)
        assert len(inputs) == self.graph.original_ops
        return Edges(tuple(inputs), tuple(controls))  # type: ignore[arg-type]


def read(tf_graph: Any) -> ReadGraph:
    """Read a graph into the IR.

    Creation order is not topological (loops, edited graphs, control inputs that name later
    operations), so edges are made in a second pass.

    Raises:
        GraphError: it is no graph, or there is nothing in it.
    """
    if not isinstance(tf_graph, tf.Graph):
        raise GraphError(f"expected a tf.Graph, got {type(tf_graph).__name__}")
    tf_ops = tf_graph.get_operations()
    if not tf_ops:
        raise GraphError("the graph is empty; build the training graph first, then rewrite it")
    graph = Graph()
    numbers: dict[Any, ValueId] = {}
    # In functions only handles are colocated, and asking each operation costs as much as the rest.
    colocates = not isinstance(tf_graph, FuncGraph)
    dtypes: dict[Any, str] = {}
    stateful: dict[str, bool] = {}
    for tf_op in tf_ops:
        outputs = []
        for t in tf_op.outputs:
            if (dtype := dtypes.get(t.dtype)) is None:
                dtype = dtypes[t.dtype] = _dtype(t.dtype)
            outputs.append((dtype, _shape(t.shape)))
        kind = tf_op.type
        if kind not in stateful:
            definition = tf_op.op_def
            stateful[kind] = definition is None or bool(definition.is_stateful)
        op = graph.add(
            tf_op.name,
            kind,
            outputs=outputs,
            device=tf_op.device,
            stateful=stateful[kind],
            colocation=_colocation(tf_op) if colocates else (),
            attrs=_attributes(tf_op, kind),
        )
        for index, value in enumerate(op.outputs):
            numbers[(tf_op.name, index)] = value
    by_name = {tf_op.name: OpId(i) for i, tf_op in enumerate(tf_ops)}
    for i, tf_op in enumerate(tf_ops):
        graph.connect(
            OpId(i),
            inputs=[numbers[(t.op.name, t.value_index)] for t in tf_op.inputs],
            controls=[by_name[c.name] for c in tf_op.control_inputs],
        )
    _set_frames(graph)
    apart = slots.split(graph, whole_runs=not colocates)
    graph.seal()
    return ReadGraph(graph, tf_graph, list(tf_ops), apart)


def _dtype(dtype: Any) -> str:
    name = _DTYPES.get(dtype.base_dtype.name, "unknown")
    return name + "*" if dtype._is_ref_dtype else name


def _shape(shape: Any) -> Shape | None:
    return None if shape.rank is None else tuple(shape)


def _colocation(tf_op: Any) -> tuple[str, ...]:
    groups = tf_op.colocation_groups()
    own = b"loc:@" + tf_op.name.encode()
    return tuple(g.decode()[5:] for g in groups if g != own)


def _attributes(tf_op: Any, kind: str) -> dict[str, Any]:
    """The few attributes that the IR understands."""
    if kind in ("Enter", "RefEnter"):
        return {"frame_name": tf_op.get_attr("frame_name").decode()}
    if kind in ("VarHandleOp", "VariableV2", "Variable"):
        shape = tf.TensorShape(tf_op.get_attr("shape"))
        return {"variable_nbytes": _variable_nbytes(tf_op.get_attr("dtype"), shape)}
    if kind == "Const" and tf_op.outputs[0].dtype.is_floating and tf_op.outputs[0].shape == ():
        return {"scalar": float(tf.make_ndarray(tf_op.node_def.attr["value"].tensor))}
    if kind == "Placeholder" and tf_op.outputs[0].dtype == tf.resource:
        data = handle_data_util.get_resource_handle_data(tf_op.outputs[0])  # a captured variable
        return {
            "variable_nbytes": sum(
                _variable_nbytes(tf.as_dtype(part.dtype), tf.TensorShape(part.shape))
                for part in data.shape_and_type
            )
        }
    return {}


def _variable_nbytes(dtype: Any, shape: Any) -> int:
    return int(dtype.size * shape.num_elements()) if shape.is_fully_defined() else 0


def _set_frames(graph: Graph) -> None:
    """Give each operation the path of v1 loop frames that it runs in."""
    if not any(op.type in ("Enter", "RefEnter") for op in graph.ops()):
        return
    frames: list[str | None] = [None] * graph.size
    work = [op.id for op in graph.ops() if not graph.predecessors(op.id)]
    for op_id in work:
        frames[op_id] = ""
    while work:
        op = graph.op(work.pop())
        mine = frames[op.id] or ""
        outside = mine.rpartition("/")[0]
        if op.type in ("Enter", "RefEnter"):
            op.frame = mine  # the frame that it is called from
            after = f"{mine}/{op.attrs['frame_name'].replace('/', '|')}"
        else:
            op.frame = mine
            after = outside if op.type in ("Exit", "RefExit") else mine
        for user in graph.successors(op.id):
            # An operation inside a loop may also read loop constants that came by Enter: all its
            # inputs agree, so the first to arrive decides, and a deeper one corrects it.
            if frames[user] is None or len(after) > len(frames[user] or ""):
                frames[user] = after
                work.append(user)


def resolve(read_graph: ReadGraph, targets: Iterable[Any]) -> list[OpId]:
    """Return the IR ids of operations given as operations, tensors or names.

    Raises:
        GraphError: one of them is not in the graph.
    """
    found: list[OpId] = []
    for target in targets:
        element = target
        if isinstance(target, str):
            try:
                element = read_graph.tf_graph.as_graph_element(target)
            except (KeyError, ValueError) as error:
                raise GraphError(f"there is no {target!r} in the graph: {error}") from None
        op = element if isinstance(element, tf.Operation) else getattr(element, "op", None)
        id_ = None if op is None else read_graph.op_id(op)
        if id_ is None:
            raise GraphError(
                f"{target!r} does not belong to the graph that is to be rewritten; pass tensors, "
                "operations or names of that graph"
            )
        found.append(id_)
    return found
