"""Replays a step on paper: which values are on the device when, and what the peak will be.

A prediction, and labelled so wherever it is shown. Operations run one after another, in a planned
order or in the one in which the runtime's executor makes them ready; an operation takes over the
buffer of an input that nobody else needs, as TensorFlow's kernels do. A graph is compiled once and
replayed for many orders.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tflms.graph.ir import Graph, OpId, ValueId
from tflms.planning import kernels, paces
from tflms.planning.allocator import Event
from tflms.planning.buffers import Buffers, Transfer
from tflms.planning.cost import Costs, Sizes, static_costs
from tflms.planning.executor import executor_order

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_TOP = 10


@dataclass(frozen=True, slots=True)
class Events:
    """What a step asks of the device's allocator, in order.

    Attributes:
        persistent: bytes of what is allocated for good before the step.
        events: what comes and goes.
        places: per event, the place of the operation in the order.
        tenants: per buffer, the values that it holds one after another, each with the place from
            which on.
    """

    persistent: tuple[int, ...]
    events: tuple[Event, ...]
    places: tuple[int, ...]
    tenants: Mapping[int, Sequence[tuple[int, ValueId]]]

    def tenant(self, buffer: int, place: int) -> ValueId | None:
        """Return the value that a buffer holds at a place; None for workspaces."""
        held = [made for made in self.tenants.get(buffer, ()) if made[0] <= place]
        return max(held)[1] if held else None


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a simulated step does to memory and time; all figures are predictions.

    Attributes:
        order: operations in the order in which they ran.
        resident: bytes on the device while each of them ran, variables included.
        peak_bytes: the largest of these.
        peak_op: the operation that ran then.
        top: the values that were resident then, largest first, with their bytes.
        host_peak_bytes: the most that was parked on the host at one time.
        moved_bytes: bytes that travelled to the host (as many travel back, or more).
        seconds: the length of the step.
        stall_seconds: how much of that the device waited for transfers.
        transfers: per copy its operation, start and end in seconds.
    """

    order: tuple[OpId, ...]
    resident: tuple[int, ...]
    peak_bytes: int
    peak_op: OpId | None
    top: tuple[tuple[ValueId, int], ...]
    host_peak_bytes: int
    moved_bytes: int
    seconds: float = 0.0
    stall_seconds: float = 0.0
    transfers: tuple[tuple[OpId, float, float], ...] = ()


def simulate(
    graph: Graph,
    weights: Sizes,
    within: set[OpId],
    *,
    order: Sequence[OpId] | None = None,
    costs: Costs | None = None,
) -> Timeline:
    """Run the operations of a step on paper.

    Args:
        graph: the graph, rewritten or not.
        weights: sizes and placement, of this very graph.
        within: the operations that run; inserted ones among them.
        order: a topological order of them that the runtime will keep; None takes the executor's.
        costs: seconds, workspaces and rates; None takes estimates.
    """
    chosen = executor_order(graph, within) if order is None else [o for o in order if o in within]
    costs = static_costs(graph, weights) if costs is None else costs
    return Replay(graph, weights, within, costs).run(chosen)


class Replay:
    """A compiled graph; ``run`` replays it in one order and takes milliseconds."""

    def __init__(
        self,
        graph: Graph,
        weights: Sizes,
        within: set[OpId],
        costs: Costs,
        *,
        like: Replay | None = None,
    ) -> None:
        """Compile a graph; ``like`` is a replay of it with other operations inserted, or none."""
        known = None if like is None else like._buffers.initial
        self._buffers: Buffers = Buffers.of(graph, weights, within, initial=known)
        self._graph, self._within, self._costs = graph, within, costs
        self._persistent = sum(self._buffers.persistent)
        size = graph.size
        self._seconds = np.zeros(size)
        self._seconds[: len(costs.seconds)] = costs.seconds
        self._workspace = np.zeros(size, np.int64)
        self._workspace[: len(costs.workspace)] = costs.workspace
        for op in graph.ops():
            if op.role == "clone" and op.origin is not None:
                self._seconds[op.id] = self._seconds[op.origin]
                self._workspace[op.id] = self._workspace[op.origin]

    @property
    def persistent_bytes(self) -> int:
        """Bytes that stay on the device all step long: variables and constants."""
        return self._persistent

    def seconds(self, order: Sequence[OpId]) -> Floats:
        """Return how long each operation of an order runs; a clone as long as what it repeats."""
        return self._seconds[np.asarray(order, np.int64)]

    def run(self, order: Sequence[OpId]) -> Timeline:
        """Replay the step in an order of all its operations."""
        count = len(order)
        sequence = np.asarray(order, np.int64)
        position = np.zeros(self._graph.size, np.int64)
        position[sequence] = np.arange(count)
        start, end, transfers, stall = self._clock(sequence, position)
        ends, taken = self._lifetimes(position, start, transfers, count)
        resident = self._resident(sequence, position, ends, taken)
        peak_at = int(np.argmax(resident)) if count else 0
        host_peak, moved = self._host(position, count)
        return Timeline(
            order=tuple(order),
            resident=tuple(resident.tolist()),
            peak_bytes=int(resident[peak_at]) if count else self._persistent,
            peak_op=OpId(int(sequence[peak_at])) if count else None,
            top=self._top(position, ends, peak_at),
            host_peak_bytes=host_peak,
            moved_bytes=moved,
            seconds=float(end),
            stall_seconds=stall,
            transfers=tuple(transfers),
        )

    def crowded_peak(self, order: Sequence[OpId], prompt: Collection[OpId] = ()) -> int:
        """Return the peak where operations that nothing has to wait for last until something does.

        They run in threads of their own, beside what comes next in the order, and hold what they
        read; all but those that are done promptly. Bytes, as ``Timeline.peak_bytes``.
        """
        count = len(order)
        sequence = np.asarray(order, np.int64)
        position = np.zeros(self._graph.size, np.int64)
        position[sequence] = np.arange(count)
        clocked = any(not out.gates for out in self._buffers.outs)  # else no end is asked for
        start: Floats = np.zeros(0)
        transfers: list[tuple[OpId, float, float]] = []
        if clocked:
            start, _, transfers, _ = self._clock(sequence, position)
        first = np.full(self._graph.size, count, np.int64)  # the place of the first that waits
        before, after = self._edges
        np.minimum.at(first, before, position[after])
        first[list(prompt)] = count
        last = np.where(first < count, np.maximum(position, first - 1), position)
        ends, taken = self._lifetimes(position, start, transfers, count, last=last)
        return int(self._resident(sequence, position, ends, taken).max(initial=0))

    @functools.cached_property
    def _edges(self) -> tuple[Ints, Ints]:
        """What comes before what in the step, by read and control edges."""
        graph, within = self._graph, self._within
        pairs = [(op, after) for op in within for after in graph.successors(op) if after in within]
        ends = np.asarray(pairs, np.int64).reshape(-1, 2)
        return ends[:, 0], ends[:, 1]

    def _resident(self, sequence: Ints, position: Ints, ends: Ints, taken: Ints) -> Ints:
        """Bytes on the device at each place of an order."""
        b = self._buffers
        count = len(sequence)
        alive, born = self._bounds(taken)
        change = np.zeros(count + 2, np.int64)
        np.add.at(change, position[b.producer[born]], b.nbytes[born])
        np.subtract.at(change, ends[alive] + 1, b.nbytes[alive])
        if len(b.write_op):  # a variable that somebody still reads is written into a new buffer
            late = ends[b.write_read] > position[b.write_op]
            np.add.at(change, position[b.write_op[late]], b.write_nbytes[late])
            np.subtract.at(change, ends[b.write_read[late]] + 1, b.write_nbytes[late])
        resident: Ints = self._persistent + np.cumsum(change[:count]) + self._workspace[sequence]
        return resident

    def _lifetimes(
        self,
        position: Ints,
        start: Floats,
        transfers: Sequence[tuple[OpId, float, float]],
        count: int,
        pace: int = 0,
        last: Ints | None = None,
    ) -> tuple[Ints, Ints]:
        """Last place of every buffer, and which (donor, heir) pairs share one.

        ``last`` is the place up to which each operation runs, where that is not its own.
        """
        b = self._buffers
        reading = (position if last is None else last)[b.use_op]
        for use, transfer in zip(b.out_uses, b.outs, strict=True):
            if paces.lasts(transfer, pace):
                reading[use] = self._released(transfer, position, start, transfers, count)
        ends = position[b.producer]
        if len(b.use_starts):
            ends[b.used] = np.maximum(ends[b.used], np.maximum.reduceat(reading, b.use_starts))
        if last is None:
            return ends, self._taken(ends[b.donor] == position[b.taker])
        # Nobody else may need a buffer any more when the operation starts that takes it over.
        alone = self._last_but_one(reading)[b.donor] < position[b.taker]
        return ends, self._taken(alone & (ends[b.donor] == last[b.taker]))

    def _last_but_one(self, reading: Ints) -> Ints:
        """Per buffer, the last place at which any but its last reader needs it; -1 for none."""
        b = self._buffers
        found = np.full(len(b.nbytes), -1, np.int64)
        if len(b.use_starts):
            latest = np.maximum.reduceat(reading, b.use_starts)
            is_last = reading == np.repeat(latest, np.diff(b.use_starts, append=len(reading)))
            several = np.add.reduceat(is_last.astype(np.int64), b.use_starts) > 1
            second = np.maximum.reduceat(np.where(is_last, -1, reading), b.use_starts)
            found[b.used] = np.where(several, latest, second)
        return found

    def _bounds(self, taken: Ints) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which buffers are freed at their end, and which are allocated at their start."""
        b = self._buffers
        alive, born = np.ones(len(b.nbytes), bool), np.ones(len(b.nbytes), bool)
        alive[b.donor[taken]] = False
        born[b.heir[taken]] = False
        return alive, born

    def events(self, order: Sequence[OpId], pace: int = 0) -> Events:
        """Return what is allocated for good, and what comes and goes in a step, in order.

        Args:
            order: of all operations.
            pace: how fast copies are. At 0 each copy out takes until an operation waits for it; at
                1 none takes any time; above, some are fast and some slow, another choice for each
                number. Copies back get their buffer at once, or some operations later.
        """
        b = self._buffers
        sequence = np.asarray(order, np.int64)
        position = np.zeros(self._graph.size, np.int64)
        position[sequence] = np.arange(len(order))
        start, _, transfers, _ = self._clock(sequence, position)
        ends, taken = self._lifetimes(position, start, transfers, len(order), pace)
        alive, born = self._bounds(taken)
        first: dict[int, int] = {}  # per copy, the place of the first that waits for it
        for waiter, copies in b.waits.items():
            for copy in copies:
                first[copy] = min(first.get(copy, len(order)), int(position[waiter]))
        home = list(range(len(b.nbytes)))
        for donor, heir in sorted(
            zip(b.donor[taken].tolist(), b.heir[taken].tolist(), strict=True),
            key=lambda pair: int(position[b.producer[pair[1]]]),
        ):
            home[heir] = home[donor]
        sized = b.nbytes > 0
        # Sorted by place; at a place results come, then (or before) scratch memory, then things go.
        found: list[tuple[int, int, Event]] = []
        for buffer in np.flatnonzero(born & sized).tolist():
            op = int(b.producer[buffer])
            at = int(position[op])
            swap = b.copies.get(op)
            if swap is not None and not paces.lasts(swap, pace):
                latest = min(first.get(op, len(order)), len(order)) - 1
                at = max(at, min(at + paces.lag(swap, pace), latest))
            found.append((at, 0, Event(buffer, int(b.nbytes[buffer]))))
        scratch = self._workspace[sequence]
        for at in np.flatnonzero(scratch).tolist():
            early = self._graph.op(int(sequence[at])).type in kernels.SCRATCH_FIRST
            found.append((at, -1 if early else 1, Event(-1 << 40, int(scratch[at]))))
            found.append((at, 2, Event(-1 << 40, 0)))
        for buffer in np.flatnonzero(alive & sized).tolist():
            at = min(int(ends[buffer]), len(order) - 1)
            found.append((at, 3, Event(home[buffer], 0)))
        persistent = list(b.persistent)
        for number, (writers, nbytes) in enumerate(b.born):
            at = min(int(position[writer]) for writer in writers)
            found.append((at, -2, Event((-1 << 41) - number, nbytes, once=True)))
            persistent.remove(nbytes)
        found.sort(key=lambda entry: entry[:2])
        tenants: dict[int, list[tuple[int, ValueId]]] = {}
        for buffer in np.flatnonzero(sized).tolist():
            made = (int(position[b.producer[buffer]]), ValueId(int(b.root[buffer])))
            tenants.setdefault(home[buffer], []).append(made)
        events, places = tuple(e for *_, e in found), tuple(at for at, *_ in found)
        return Events(tuple(persistent), events, places, tenants)

    def _taken(self, free: npt.NDArray[np.bool_]) -> Ints:
        """Indices of the (donor, heir) pairs whose buffer is handed on, one per operation."""
        possible = np.flatnonzero(free)
        _, first = np.unique(self._buffers.taker[possible], return_index=True)
        return possible[first]

    def _clock(
        self, sequence: Ints, position: Ints
    ) -> tuple[Floats, float, list[tuple[OpId, float, float]], float]:
        """Start of every operation, end of the step, transfers, and time lost in waiting."""
        b, costs = self._buffers, self._costs
        durations = self._seconds[sequence]
        if not b.outs and not b.ins:
            ends = np.cumsum(durations)
            return ends - durations, float(ends[-1]) if len(ends) else 0.0, [], 0.0
        done: dict[int, float] = {}
        waits = b.waits
        transfers: list[tuple[OpId, float, float]] = []
        start = np.zeros(len(sequence))
        out_free = in_free = now = stall = 0.0
        for place, (op, seconds) in enumerate(
            zip(sequence.tolist(), durations.tolist(), strict=True)
        ):
            copy = b.copies.get(op)
            if copy is not None:
                ready = max((done.get(p, now) for p in waits.get(op, ())), default=now)
                if copy.out:
                    begin = max(now, out_free)
                    finish = out_free = begin + copy.nbytes / costs.to_host
                else:
                    begin = max(ready, now, in_free)
                    finish = in_free = begin + copy.nbytes / costs.to_device
                done[op] = finish
                transfers.append((OpId(op), begin, finish))
                start[place] = now
                continue
            if op in waits:
                ready = max(done.get(p, 0.0) for p in waits[op])
                if ready > now:
                    stall += ready - now
                    now = ready
            start[place] = now
            now += seconds
        return start, max([now, *done.values()]), transfers, stall

    def _released(
        self,
        transfer: Transfer,
        position: Ints,
        start: Floats,
        transfers: Sequence[tuple[OpId, float, float]],
        count: int,
    ) -> int:
        """The last place at which a value that is on its way to the host is still on the device.

        An operation that waits for the copy comes after it for certain; without one, the copy's
        predicted end decides.
        """
        if transfer.gates:
            return int(min(position[g] for g in transfer.gates)) - 1
        finish = next(e for op, _, e in transfers if op == transfer.op)
        after = int(np.searchsorted(start, finish, side="left"))
        return min(max(after, int(position[transfer.op]) + 1), count - 1)

    def _host(self, position: Ints, count: int) -> tuple[int, int]:
        b = self._buffers
        change = np.zeros(count + 2, np.int64)
        parked = (*b.outs, *b.joins)
        for out in parked:
            change[position[out.op]] += out.nbytes
            last = max((int(position[r]) for r in out.readers), default=int(position[out.op]))
            change[last + 1] -= out.nbytes
        peak = int(np.max(np.cumsum(change))) if parked else 0
        return peak, sum(out.nbytes for out in b.outs)

    def _top(self, position: Ints, ends: Ints, at: int) -> tuple[tuple[ValueId, int], ...]:
        b = self._buffers
        here = np.flatnonzero((position[b.producer] <= at) & (ends >= at) & (b.nbytes > 0))
        rank = sorted(here.tolist(), key=lambda g: (-int(b.nbytes[g]), int(b.root[g])))
        return tuple((ValueId(int(b.root[g])), int(b.nbytes[g])) for g in rank[:_TOP])
