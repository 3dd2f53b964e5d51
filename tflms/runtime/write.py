"""Hands a rewrite back: replays its net effect on the user's ``tf.Graph``, all or nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework.func_graph import FuncGraph

from tflms.checkpointing import guard
from tflms.errors import HandBackError
from tflms.graph import erase, order
from tflms.graph.ir import Graph, OpId, Use, ValueId
from tflms.runtime import sessions
from tflms.runtime.read import ReadGraph

_log = logging.getLogger(__name__)
# Grappler leaves nodes with this attribute alone; without it identity pairs vanish without a word.
KEEP = "_grappler_do_not_remove"
_TRUE = attr_value_pb2.AttrValue(b=True)


@dataclass(frozen=True, slots=True)
class NetEdits:
    """What a rewrite amounts to, once edits that cancel out are gone.

    Attributes:
        added: inserted operations, each behind what it needs.
        rewired: input slots of the user's operations and what they read now.
        controls: new control edges on the user's operations.
    """

    added: tuple[OpId, ...]
    rewired: tuple[tuple[Use, ValueId], ...]
    controls: tuple[tuple[OpId, OpId], ...]


def net_edits(graph: Graph) -> NetEdits:
    """Compact the journal of a graph."""
    touched = dict.fromkeys(
        Use(e.op, e.slot) for e in graph.journal if e.kind == "rewire" and e.op < graph.original_ops
    )
    rewired = [
        (use, now)
        for use in touched
        if (now := graph.op(use.op).inputs[use.slot]) != erase.original(graph, now)
    ]
    controls = [
        (op, after)
        for op, afters in sorted(erase.added_controls(graph).items())
        for after in sorted(afters)
    ]
    added = [op for op in order.topological(graph) if op >= graph.original_ops]
    return NetEdits(tuple(added), tuple(rewired), tuple(controls))


def hand_back(read: ReadGraph, step: Sequence[bool], *, keep: bool = True) -> list[Any]:
    """Replay a rewrite on the graph that was read, and return the inserted TensorFlow operations.

    Everything that TensorFlow would refuse is looked for first; should it refuse all the same, the
    user's operations get their edges back. What the IR read slot by slot is taken apart in earnest:
    readers of an IdentityN read its inputs, as new edges may lead from one of them to another's
    maker. ``keep=False`` leaves out the attribute that defends the inserted operations against
    Grappler, which exists to show that the check finds it out. ``step`` tells, per operation of the
    user's, whether the training step runs it.

    Raises:
        HandBackError: the graph is finalized, changed since it was read, or a session has run an
            operation that would be edited; nothing is changed then.
    """
    edits = net_edits(read.graph)
    if not edits.added and not edits.controls:
        return []
    _check(read, edits)
    replay = _Replay(read, step, keep)
    try:
        replay.run(edits)
    except Exception as error:
        replay.undo()
        raise HandBackError(
            f"TensorFlow {tf.__version__} refused an edit ({error}); the edges of the graph are as "
            "they were"
        ) from error
    _log.info("handed back %d operations, %d edges", len(edits.added), len(edits.rewired))
    return replay.made


def _check(read: ReadGraph, edits: NetEdits) -> None:
    tf_graph = read.tf_graph
    if tf_graph.finalized:
        raise HandBackError(
            "the graph is finalized and cannot be edited; rewrite it before "
            "MonitoredSession, Supervisor or graph.finalize() close it"
        )
    edited = dict.fromkeys([use.op for use, _ in edits.rewired] + [op for op, _ in edits.controls])
    edited |= dict.fromkeys(use.op for use in _readers_of_slots(read))
    for op in edited:
        tf_op, name = read.tf_ops[read.slots.get(op, (op, 0))[0]], read.tf_name(op)
        if tf_graph.get_operation_by_name(name) is not tf_op:
            raise HandBackError(f"the graph has another operation {name!r} than when read")
    if not isinstance(tf_graph, FuncGraph):  # sessions run no function graphs
        sessions.refuse_if_run(tf_graph)


def _readers_of_slots(read: ReadGraph) -> list[Use]:
    """The uses by the user's operations of what is read slot by slot."""
    graph = read.graph
    uses = (use for slot in read.slots for use in graph.uses(graph.op(slot).outputs[0]))
    return [u for u in uses if u.op < graph.original_ops and u.op not in read.slots]


class _Replay:
    """One replay, with what is needed to take it back."""

    def __init__(self, read: ReadGraph, step: Sequence[bool], keep: bool) -> None:
        self.read, self.keep = read, keep
        self.made: list[Any] = []
        self._alone = guard.alone(read.graph, step)
        self._ops: dict[OpId, Any] = {}
        self._rewired: list[tuple[Any, int, Any]] = []
        self._controlled: list[tuple[Any, list[Any]]] = []

    def run(self, edits: NetEdits) -> None:
        graph, tf_graph = self.read.graph, self.read.tf_graph
        with (
            tf_graph.as_default(),
            tf_graph.control_dependencies(None),
            tf_graph.colocate_with(None, ignore_existing=True),
        ):
            for op in edits.added:
                self._ops[op] = self._make(op)
                self.made.append(self._ops[op])
        for use, value in edits.rewired:
            if use.op not in self.read.slots:  # a slot's readers read what it reads
                self._rewire(use, value)
        for use in _readers_of_slots(self.read):
            self._rewire(use, graph.op(use.op).inputs[use.slot])
        for op, after in edits.controls:
            for waiting in self._waiting(op):
                self._controlled.append((waiting, list(waiting.control_inputs)))
                waiting._add_control_input(self._op(after))
        assert all(graph.op(op).role for op in self._ops)

    def _rewire(self, use: Use, value: ValueId) -> None:
        tf_op, tensor = self.read.tf_ops[use.op], self._tensor(value)
        if tf_op.inputs[use.slot] is not tensor:
            self._rewired.append((tf_op, use.slot, tf_op.inputs[use.slot]))
            tf_op._update_input(use.slot, tensor)

    def _waiting(self, op: OpId) -> list[Any]:
        """TensorFlow's operations that wait where one of the user's is to wait."""
        if op not in self.read.slots:
            return [self.read.tf_ops[op]]
        graph = self.read.graph  # a slot is no operation of TensorFlow's: its readers wait
        readers = dict.fromkeys(use.op for use in graph.uses(graph.op(op).outputs[0]))
        return [self._op(r) for r in readers if r not in self.read.slots] + [
            waiting for r in readers if r in self.read.slots for waiting in self._waiting(r)
        ]

    def undo(self) -> None:
        for tf_op, slot, tensor in reversed(self._rewired):
            tf_op._update_input(slot, tensor)
        for tf_op, controls in reversed(self._controlled):
            tf_op._remove_all_control_inputs()
            tf_op._add_control_inputs(controls)

    def _op(self, op: OpId) -> Any:
        graph = self.read.graph
        while op in self.read.slots:  # it is done when what it shows is there
            op = graph.value(graph.op(op).inputs[0]).op
        return self._ops[op] if op in self._ops else self.read.tf_ops[op]

    def _tensor(self, value: ValueId) -> Any:
        graph = self.read.graph
        v = graph.value(value)
        while v.op in self.read.slots:
            v = graph.value(graph.op(v.op).inputs[0])
        return self._op(v.op).outputs[v.index]

    def _like(self, origin: OpId) -> tuple[dict[str, Any], list[Any]]:
        """Attributes and output types of a repetition of one of the user's operations."""
        op, index = self.read.slots.get(origin, (origin, 0))
        twin = self.read.tf_ops[op]
        attrs = {key: twin.node_def.attr[key] for key in twin.node_def.attr if key != "_class"}
        if op == origin:
            return attrs, [t.dtype for t in twin.outputs]
        kind = twin.outputs[index].dtype
        attrs["T"] = attr_value_pb2.AttrValue(
            list=attr_value_pb2.AttrValue.ListValue(type=[kind.as_datatype_enum])
        )
        return attrs, [kind]

    def _make(self, op_id: OpId) -> Any:
        op = self.read.graph.op(op_id)
        tf_graph = self.read.tf_graph
        inputs = [self._tensor(v) for v in op.inputs]
        if op.repeats:
            assert op.origin is not None
            attrs, types = self._like(op.origin)
        else:
            attrs = {
                "T": attr_value_pb2.AttrValue(type=inputs[0].dtype.base_dtype.as_datatype_enum)
            }
            types = [inputs[0].dtype.base_dtype]
        if self.keep and (op.role != "clone" or op_id in self._alone):
            attrs[KEEP] = _TRUE  # clones are fused and folded just as what they repeat
        tf_op = tf_graph._create_op_internal(
            op.type, inputs, types, name=op.name + "/", attrs=attrs
        )
        tf_op._set_device(op.device)
        for after in op.controls:
            tf_op._add_control_input(self._op(after))
        return tf_op
