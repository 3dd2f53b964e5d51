"""Which values share a device buffer, who reads and who takes it over: a step as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tflms.graph import effects
from tflms.graph.erase import original
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.planning import kernels
from tflms.planning.allocator import rounded
from tflms.planning.cost import Sizes
from tflms.planning.executor import executor_order
from tflms.planning.initial import Initial, initial_constants

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between device and host.

    Attributes:
        op: the inserted operation.
        nbytes: what moves.
        out: from the device to the host.
        gates: operations that wait for the copy out to be done; copies back among them.
        readers: operations that read the copy.
        source: the value that is copied; of the user's graph, so the same in every attempt.
    """

    op: OpId
    nbytes: int
    out: bool
    gates: tuple[OpId, ...]
    readers: tuple[OpId, ...]
    source: ValueId


@dataclass(frozen=True, slots=True)
class Buffers:
    """A step as arrays; a buffer is a value with all views of it.

    Attributes:
        root, producer, nbytes: per buffer the value that it is made for, its operation, its size.
        use_op: reading operation per use, grouped by buffer; ``use_starts`` are the starts of the
            groups and ``used`` their buffers.
        donor, heir, taker: an operation may let its result live in the buffer of an input.
        write_op, write_read, write_nbytes: an operation overwrites a variable that a read buffer
            still shows.
        outs, out_uses: copies to the host, and which entry of ``use_op`` is theirs.
        ins: copies back. copies: both, by operation.
        joins: what is put together on the host, as copies that no link carries.
        waits: per operation that waits for copies, those.
        persistent: bytes of each variable and constant.
        initial: those of the constants that variables were started with.
        born: per variable that shares its buffer with such a constant until it is first written,
            the operations that write it, and its bytes (of ``persistent``).
    """

    root: Ints
    producer: Ints
    nbytes: Ints
    use_op: Ints
    use_starts: Ints
    used: Ints
    donor: Ints
    heir: Ints
    taker: Ints
    write_op: Ints
    write_read: Ints
    write_nbytes: Ints
    outs: tuple[Transfer, ...]
    out_uses: tuple[int, ...]
    ins: tuple[Transfer, ...]
    joins: tuple[Transfer, ...]
    copies: Mapping[int, Transfer]
    waits: Mapping[int, tuple[OpId, ...]]
    persistent: tuple[int, ...]
    initial: Initial
    born: tuple[tuple[tuple[int, ...], int], ...]

    @staticmethod
    def of(
        graph: Graph,
        weights: Sizes,
        within: set[OpId],
        *,
        initial: Initial | None = None,
    ) -> Buffers:
        """Compile the operations of a step.

        Args:
            graph: the graph.
            weights: of this very graph.
            within: the operations that run.
            initial: constants that variables were started with, where they are known.
        """
        if initial is None:
            initial = initial_constants(graph, weights, within)
        return _Compiler(graph, weights, within, initial).compile()


class _Compiler:
    def __init__(self, graph: Graph, weights: Sizes, within: set[OpId], initial: Initial) -> None:
        self.graph, self.weights, self.within, self.initial = graph, weights, within, initial
        self.buffer = [-1] * graph.value_count
        self.root: list[int] = []
        self.producer: list[int] = []
        self.nbytes: list[int] = []
        self.takeable: list[bool] = []
        self.folded: set[OpId] = set()
        self.persistent = [
            rounded(int(op.attrs.get("variable_nbytes", 0)))
            for op in graph.ops()
            if weights.on_device[op.id]
        ]
        self.reads_of: dict[ValueId, list[int]] = {}  # variable handle -> buffers that show it
        self.kept: set[tuple[OpId, int]] = set()  # constants that count already, and their output

    def compile(self) -> Buffers:
        graph, within = self.graph, self.within
        order = executor_order(graph, within)
        self.folded = kernels.folded(graph, order)
        for op_id in order:
            self._make(op_id)
        self.persistent += self.initial.nbytes
        uses: list[list[int]] = [[] for _ in self.root]
        donor: list[int] = []
        heir: list[int] = []
        taker: list[int] = []
        for op_id in order:
            op = graph.op(op_id)
            if op_id in self.folded:
                continue
            for value in op.inputs:
                if (buffer := self.buffer[value]) >= 0:
                    uses[buffer].append(op_id)
            if op.type not in kernels.FORWARDING or not op.outputs:
                continue
            mine = self.buffer[op.outputs[0]]
            for value in op.inputs:
                theirs = self.buffer[value]
                if (
                    theirs >= 0
                    and mine >= 0
                    and theirs != mine
                    and self.takeable[theirs]
                    and self.nbytes[theirs] == self.nbytes[mine] > 0
                    and sum(self.buffer[v] == theirs for v in op.inputs) == 1
                ):
                    donor.append(theirs)
                    heir.append(mine)
                    taker.append(op_id)
        return self._arrays(uses, donor, heir, taker)

    def _make(self, op_id: OpId) -> None:
        graph, op = self.graph, self.graph.op(op_id)
        facts = effects.of(op.type)
        if op.role == "swap_out":
            return
        if op.role == "swap_in":
            self._new(op.outputs[0], takeable=True)
            return
        on_device = self.weights.on_device[op_id]
        for index, value in enumerate(op.outputs):
            if not on_device:  # a device operation that reads it gets a copy
                if any(self.weights.on_device[u.op] for u in graph.uses(value)):
                    self._new(value, takeable=True)
            elif op_id in self.folded:
                same = (op.attrs.get("equal_to", op_id), index)
                if same not in self.kept and any(self._reads(u.op) for u in graph.uses(value)):
                    self.kept.add(same)
                    self.persistent.append(rounded(self.weights.nbytes[value]))
            elif "argument" in op.attrs:  # its caller holds it
                self.persistent.append(rounded(self.weights.nbytes[value]))
            elif facts.reads and not facts.writes:
                self._new(value, takeable=False, nbytes=0)
                self.reads_of.setdefault(op.inputs[0], []).append(self.buffer[value])
            elif kernels.shows_input(op):
                shown = op.inputs[index if op.type == "IdentityN" else 0]
                self.buffer[value] = self.buffer[shown]
            else:
                self._new(value, takeable=True)

    def _reads(self, op: OpId) -> bool:
        return op in self.within and op not in self.folded

    def _new(self, value: ValueId, *, takeable: bool, nbytes: int | None = None) -> None:
        self.buffer[value] = len(self.root)
        self.root.append(value)
        self.producer.append(self.graph.value(value).op)
        self.nbytes.append(rounded(self.weights.nbytes[value]) if nbytes is None else nbytes)
        self.takeable.append(takeable)

    def _arrays(
        self, uses: list[list[int]], donor: list[int], heir: list[int], taker: list[int]
    ) -> Buffers:
        flat: list[int] = []
        starts: list[int] = []
        used: list[int] = []
        outs: list[Transfer] = []
        out_uses: list[int] = []
        for buffer, readers in enumerate(uses):
            if readers:
                starts.append(len(flat))
                used.append(buffer)
            for reader in readers:
                if self.graph.op(reader).role == "swap_out":
                    outs.append(self._transfer(OpId(reader), out=True))
                    out_uses.append(len(flat))
                flat.append(reader)
        ins = [
            self._transfer(op.id, out=False)
            for op in self.graph.ops()
            if op.role == "swap_in" and op.id in self.within
        ]
        joins = tuple(
            self._transfer(op.id, out=True)
            for op in self.graph.ops()
            if op.role == "swap_join" and op.id in self.within
        )
        copies: dict[int, Transfer] = {copy.op: copy for copy in (*outs, *ins)}
        waits: dict[int, tuple[OpId, ...]] = {}
        for copy in copies.values():
            for after in self.graph.successors(copy.op):
                if after in self.within:
                    waits[after] = (*waits.get(after, ()), copy.op)
        write_op, write_read, write_nbytes = self._writes()
        return Buffers(
            _ints(self.root), _ints(self.producer), _ints(self.nbytes), _ints(flat), _ints(starts),
            _ints(used), _ints(donor), _ints(heir), _ints(taker), _ints(write_op),
            _ints(write_read), _ints(write_nbytes), tuple(outs), tuple(out_uses), tuple(ins),
            joins, copies, waits, tuple(n for n in self.persistent if n), self.initial,
            tuple((w, rounded(n)) for w, n in self._born()),
        )  # fmt: skip

    def _transfer(self, op_id: OpId, *, out: bool) -> Transfer:
        graph = self.graph
        op = graph.op(op_id)
        readers = tuple(u.op for u in graph.uses(op.outputs[0]) if u.op in self.within)
        joins = [r for r in readers if graph.op(r).role == "swap_join"]
        waiting = (*graph.control_users(op_id), *joins)
        gates = tuple(c for c in waiting if c in self.within) if out else ()
        copied = op.outputs[0]
        return Transfer(
            op_id, self.weights.nbytes[copied], out, gates, readers, original(graph, copied)
        )

    def _born(self) -> list[tuple[tuple[int, ...], int]]:
        """Variables that are started with a constant, with what writes them in the step."""
        found: list[tuple[tuple[int, ...], int]] = []
        for handle in self.initial.sharing:
            nbytes = int(self.graph.producer(handle).attrs.get("variable_nbytes", 0))
            writers = tuple(
                use.op
                for use in self.graph.uses(handle)
                if use.op in self.within
                and use.slot in effects.of(self.graph.op(use.op).type).writes
            )
            if writers and nbytes:
                found.append((writers, nbytes))
        return found

    def _writes(self) -> tuple[list[int], list[int], list[int]]:
        ops: list[int] = []
        reads: list[int] = []
        nbytes: list[int] = []
        for op in self.graph.ops():
            if op.id not in self.within:
                continue
            for slot in effects.of(op.type).writes:
                handle = op.inputs[slot]
                home = self.graph.producer(handle)
                size = int(home.attrs.get("variable_nbytes", 0))
                for buffer in self.reads_of.get(handle, ()):
                    ops.append(op.id)
                    reads.append(buffer)
                    nbytes.append(size)
        return ops, reads, nbytes


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, np.int64)
