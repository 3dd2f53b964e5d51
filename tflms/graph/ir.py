"""A training graph as operations and values with dense ids, and the only gate to change it.

Variable semantics (after arXiv 1807.02037, section 3): an edge says how its target uses it.
A ``read`` edge hands over a value, a ``control`` edge only orders, and an ``update`` edge says that
its source overwrites the variable at its target; update edges close the training loop and order
nothing within a step. Handles of variables are values of their own kind that no rule may touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tflms.errors import InvariantError
from tflms.graph.elements import Edit
from tflms.graph.elements import Op as Op
from tflms.graph.elements import OpId as OpId
from tflms.graph.elements import Shape as Shape
from tflms.graph.elements import Use as Use
from tflms.graph.elements import Value as Value
from tflms.graph.elements import ValueId as ValueId


class Graph:
    """Operations and values by dense id, changed only through the methods below ``# edits``.

    Ids of dropped operations stay unused. ``journal`` holds every edit since the graph was
    sealed; ``version`` grows with each, so that derived views know when they are stale.
    """

    def __init__(self) -> None:
        self._ops: list[Op | None] = []
        self._values: list[Value] = []
        self._control_users: list[list[OpId]] = []
        # Neighbours of each operation, until an edge of it changes; every pass asks for them.
        self._before: list[list[OpId] | None] = []
        self._after: list[list[OpId] | None] = []
        self._by_name: dict[str, OpId] = {}
        self._dropped: dict[OpId, Op] = {}
        self.journal: list[Edit] = []
        self.version = 0
        self.original_ops = 0  # ids below this one are the user's, once the graph is sealed

    # reading ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(op is not None for op in self._ops)

    @property
    def size(self) -> int:
        """One more than the largest operation id ever used."""
        return len(self._ops)

    @property
    def value_count(self) -> int:
        """One more than the largest value id ever used."""
        return len(self._values)

    def op(self, op: OpId | int) -> Op:
        """Return an operation.

        Raises:
            InvariantError: it was dropped, or never was.
        """
        found = self._ops[op] if 0 <= op < len(self._ops) else None
        if found is None:
            raise InvariantError(f"operation {op} is not in the graph")
        return found

    def has(self, op: OpId | int) -> bool:
        """Tell whether an operation of that id exists."""
        return 0 <= op < len(self._ops) and self._ops[op] is not None

    def value(self, value: ValueId | int) -> Value:
        """Return a value."""
        return self._values[value]

    def ops(self) -> Iterator[Op]:
        """Iterate over the operations in id order."""
        return (op for op in self._ops if op is not None)

    def producer(self, value: ValueId) -> Op:
        """Return the operation that makes a value."""
        return self.op(self._values[value].op)

    def uses(self, value: ValueId) -> tuple[Use, ...]:
        """Return the input slots that read a value, in the order in which they came to be."""
        return tuple(self._values[value].uses)

    def control_users(self, op: OpId) -> tuple[OpId, ...]:
        """Return the operations that wait for an operation by a control edge."""
        return tuple(self._control_users[op])

    def find(self, name: str) -> OpId | None:
        """Return the id of the operation of that name, or None."""
        return self._by_name.get(name)

    def value_name(self, value: ValueId) -> str:
        """Return how people call a value: the operation's name, and ``:slot`` unless it is 0."""
        v = self._values[value]
        name = self.op(v.op).name
        return f"{name}:{v.index}" if v.index else name

    def find_value(self, name: str) -> ValueId | None:
        """Return the value called ``op`` or ``op:slot``, or None."""
        op = self._by_name.get(name)
        slot = 0
        if op is None:
            head, _, tail = name.rpartition(":")
            op = self._by_name.get(head)
            if op is None or not tail.isdigit():
                return None
            slot = int(tail)
        outputs = self.op(op).outputs
        return outputs[slot] if slot < len(outputs) else None

    def orders(self, source: OpId, target: OpId) -> bool:
        """Tell whether an edge between two operations orders them within a step.

        The edge that closes a v1 loop (NextIteration to Merge) does not.
        """
        return not (
            self.op(source).type in ("NextIteration", "RefNextIteration")
            and self.op(target).type in ("Merge", "RefMerge")
        )

    def predecessors(self, op: OpId) -> Sequence[OpId]:
        """Return the operations ordered directly before one, data edges first, without repeats."""
        known = self._before[op]
        if known is None:
            known = self._before[op] = self._predecessors(op)
        return known

    def reader_types(self, op: OpId) -> list[str]:
        """Return the types of the operations that read what an operation makes, one a use."""
        return [self.op(use.op).type for value in self.op(op).outputs for use in self.uses(value)]

    def successors(self, op: OpId) -> Sequence[OpId]:
        """Return the operations ordered directly after one, without repeats."""
        known = self._after[op]
        if known is None:
            known = self._after[op] = self._successors(op)
        return known

    def _predecessors(self, op: OpId) -> list[OpId]:
        node = self.op(op)
        found = dict.fromkeys(self._values[v].op for v in node.inputs)
        found.update(dict.fromkeys(node.controls))
        if node.type in ("Merge", "RefMerge"):
            return [p for p in found if self.orders(p, op)]
        return list(found)

    def _successors(self, op: OpId) -> list[OpId]:
        node = self.op(op)
        found = dict.fromkeys(use.op for v in node.outputs for use in self._values[v].uses)
        found.update(dict.fromkeys(self._control_users[op]))
        if node.type in ("NextIteration", "RefNextIteration"):
            return [s for s in found if self.orders(op, s)]
        return list(found)

    # edits ------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        type: str,
        *,
        inputs: Iterable[ValueId] = (),
        controls: Iterable[OpId] = (),
        outputs: Sequence[tuple[str, Shape | None]] = (),
        device: str = "",
        stateful: bool = False,
        frame: str = "",
        colocation: tuple[str, ...] = (),
        role: str = "",
        origin: OpId | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> Op:
        """Add an operation and its outputs, each given by dtype and shape.

        Raises:
            InvariantError: the name is taken.
        """
        if name in self._by_name:
            raise InvariantError(f"there is an operation called {name!r} already")
        id_ = OpId(len(self._ops))
        op = Op(id_, name, type, device, list(inputs), list(dict.fromkeys(controls)), [], stateful,
                frame, colocation, role, origin, attrs or {})  # fmt: skip
        for index, (dtype, shape) in enumerate(outputs):
            value = Value(ValueId(len(self._values)), id_, index, dtype, shape)
            self._values.append(value)
            op.outputs.append(value.id)
        self._ops.append(op)
        self._control_users.append([])
        self._before.append(None)
        self._after.append(None)
        self._by_name[name] = id_
        self._link(op)
        self._record(Edit("add", id_))
        return op

    def connect(self, op: OpId, *, inputs: Iterable[ValueId], controls: Iterable[OpId]) -> None:
        """Give an operation its edges while the graph is being built (loops need two passes)."""
        node = self.op(op)
        node.inputs = list(inputs)
        node.controls = list(dict.fromkeys(controls))
        self._link(node)
        self.version += 1

    def rewire(self, use: Use, value: ValueId) -> None:
        """Let an input slot read another value.

        Raises:
            InvariantError: the types differ, or one of the two is no plain tensor.
        """
        op = self.op(use.op)
        old = op.inputs[use.slot]
        before, after = self._values[old], self._values[value]
        if before.dtype != after.dtype or not (before.is_tensor and after.is_tensor):
            raise InvariantError(
                f"slot {use.slot} of {op.name!r} reads a {before.dtype}, which a {after.dtype} "
                "cannot replace"
            )
        self._set_input(use, value)
        self._record(Edit("rewire", use.op, use.slot, old, value))

    def add_control(self, op: OpId, after: OpId) -> None:
        """Let an operation wait for another; a second edge of the same kind is not added."""
        if after in self.op(op).controls:
            return
        self.op(op).controls.append(after)
        self._control_users[after].append(op)
        self._before[op] = self._after[after] = None
        self._record(Edit("control", op, other=after, position=len(self.op(op).controls) - 1))

    def remove_control(self, op: OpId, after: OpId) -> None:
        """Take a control edge away again; only those of inserted operations may go.

        Raises:
            InvariantError: the edge is the user's own, or is not there.
        """
        node = self.op(op)
        if after not in node.controls or (node.id < self.original_ops and not node.role):
            raise InvariantError(f"{node.name!r} has no control edge that may be taken away")
        position = node.controls.index(after)
        del node.controls[position]
        self._control_users[after].remove(op)
        self._before[op] = self._after[after] = None
        self._record(Edit("uncontrol", op, other=after, position=position))

    def drop(self, op: OpId) -> None:
        """Remove an inserted operation that nothing uses any more.

        Raises:
            InvariantError: it is the user's own, or something still uses it.
        """
        node = self.op(op)
        if not node.role:
            raise InvariantError(f"{node.name!r} is not ours to remove")
        if self._control_users[op] or any(self._values[v].uses for v in node.outputs):
            raise InvariantError(f"{node.name!r} is still in use")
        self._unlink(node)
        self._record(Edit("drop", op))
        self._dropped[op] = node
        self._ops[op] = None
        del self._by_name[node.name]

    def seal(self) -> None:
        """Declare what is there now the user's graph; the journal starts here.

        Text may show a graph that is rewritten already: its inserted operations come last.
        """
        inserted = (i for i, op in enumerate(self._ops) if op is None or op.role)
        self.original_ops = next(inserted, len(self._ops))
        self.journal.clear()

    def rollback(self, length: int) -> None:
        """Take back all edits after the journal had ``length`` entries, the last first."""
        while len(self.journal) > length:
            edit = self.journal.pop()
            self.version += 1
            if edit.kind == "add":
                op = self.op(edit.op)
                self._unlink(op)
                self._ops[op.id] = None
                del self._by_name[op.name]
            elif edit.kind == "drop":
                op = self._dropped.pop(edit.op)
                self._ops[op.id] = op
                self._by_name[op.name] = op.id
                self._link(op)
            elif edit.kind == "rewire":
                assert edit.old is not None
                self._set_input(Use(edit.op, edit.slot), edit.old)
            elif edit.kind == "control":
                assert edit.other is not None
                self.op(edit.op).controls.remove(edit.other)
                self._control_users[edit.other].remove(edit.op)
                self._before[edit.op] = self._after[edit.other] = None
            else:
                assert edit.other is not None
                self.op(edit.op).controls.insert(edit.position, edit.other)
                self._control_users[edit.other].append(edit.op)
                self._before[edit.op] = self._after[edit.other] = None

    # plumbing ---------------------------------------------------------------------------------

    def _record(self, edit: Edit) -> None:
        self.journal.append(edit)
        self.version += 1

    def _set_input(self, use: Use, value: ValueId) -> None:
        op = self.op(use.op)
        for changed in (op.inputs[use.slot], value):
            self._after[self._values[changed].op] = None
        self._before[use.op] = None
        self._values[op.inputs[use.slot]].uses.remove(use)
        op.inputs[use.slot] = value
        self._values[value].uses.append(use)

    def _link(self, op: Op) -> None:
        for slot, value in enumerate(op.inputs):
            self._values[value].uses.append(Use(op.id, slot))
        for other in op.controls:
            self._control_users[other].append(op.id)
        self._forget(op)

    def _unlink(self, op: Op) -> None:
        for slot, value in enumerate(op.inputs):
            self._values[value].uses.remove(Use(op.id, slot))
        for other in op.controls:
            self._control_users[other].remove(op.id)
        self._forget(op)

    def _forget(self, op: Op) -> None:
        """Drop what is remembered of an operation's neighbours, and of it as their neighbour."""
        self._before[op.id] = self._after[op.id] = None
        for value in op.inputs:
            self._after[self._values[value].op] = None
        for other in op.controls:
            self._after[other] = None
