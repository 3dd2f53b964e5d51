"""The five operations a schedule is made of, and an independent simulator that replays them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tflms.checkpointing.chain import Chain
from tflms.errors import InvariantError


class Kind(StrEnum):
    """What an operation of stage l does; its input is a^(l-1), or the saved set of stage l-1.

    Source: Beaumont et al. (2019); ``F_DROP`` is an addition (see ``drop_inputs``).
    """

    F_ALL = "F_all"  # forward; keeps its input and everything backward needs
    F_CK = "F_ck"  # forward; keeps its input and the output only
    F_NULL = "F_null"  # forward; keeps the output only, its input is released
    F_DROP = "F_drop"  # as F_all, but its input is released: it must be rebuilt before B
    B = "B"  # backward; releases the gradient, the saved set and a^(l-1)


class Operation(NamedTuple):
    """One operation of one stage (1..n)."""

    kind: Kind
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}"


class Held(StrEnum):
    """The kinds of item that memory holds."""

    ACTIVATION = "a"  # the output of a stage
    SAVED = "abar"  # what F_all keeps of a stage, its output included
    GRADIENT = "d"  # the gradient with respect to the output of a stage


class Item(NamedTuple):
    """Something in memory: an activation, a saved set or a gradient, of stage 0..n."""

    held: Held
    stage: int

    def __str__(self) -> str:
        return f"{self.held}^{self.stage}"


@dataclass(frozen=True, slots=True)
class Step:
    """One replayed operation.

    Attributes:
        operation: what ran.
        seconds: how long it took.
        source: the item that served as the stage's input.
        produced: the item that it added.
        released: the items that left memory when it was done.
        stored_bytes: what memory held before it, inputs included.
        peak_bytes: the most that memory held while it ran.
    """

    operation: Operation
    seconds: float
    source: Item
    produced: Item
    released: tuple[Item, ...]
    stored_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of replaying a schedule.

    Attributes:
        steps: the operations in order.
        makespan: seconds, the sum of the durations.
        peak_bytes: the most that memory held at any time.
    """

    steps: tuple[Step, ...]
    makespan: float
    peak_bytes: int


def replay(chain: Chain, operations: Iterable[Operation]) -> Replay:
    """Run a schedule against the memory model and return its time and peak.

    The simulator knows nothing of how the schedule was found: it starts with a^0 and d^n, checks
    that each operation finds what it needs, and adds up bytes.

    Raises:
        InvariantError: an operation lacks an input, repeats what is in memory, or the schedule does
            not end with the backward of stage 1.
    """
    memory = _Memory(chain)
    steps = tuple(memory.run(operations))
    if memory.gradient != 0:
        raise InvariantError(
            f"the schedule ends after {len(steps)} operations with {memory.gradient} stages left "
            "to back-propagate; every stage needs a B, from the last to the first"
        )
    makespan = math.fsum(step.seconds for step in steps)
    start = chain.activation_bytes[0] + chain.gradient_bytes[-1]
    return Replay(steps, makespan, max(start, *(step.peak_bytes for step in steps)))


class _Memory:
    """The items in memory and their bytes, changed one operation at a time."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.activations = {0}
        self.saved: set[int] = set()
        self.gradient = chain.stages
        self.nbytes = chain.activation_bytes[0] + chain.gradient_bytes[-1]
        self.sizes = {
            Held.ACTIVATION: chain.activation_bytes,
            Held.SAVED: (0, *chain.saved_bytes),
            Held.GRADIENT: chain.gradient_bytes,
        }

    def run(self, operations: Iterable[Operation]) -> Iterator[Step]:
        for position, operation in enumerate(operations):
            try:
                yield self.step(operation)
            except _CannotRunError as error:
                raise InvariantError(f"operation {position}, {operation}: {error}") from None

    def step(self, operation: Operation) -> Step:
        kind, stage = operation
        if not 1 <= stage <= self.chain.stages:
            raise _CannotRunError(f"the chain has the stages 1 to {self.chain.stages}")
        before = self.nbytes
        source = self._source(stage)
        if kind is Kind.B:
            seconds, peak, produced, released = self._backward(stage, source)
        else:
            seconds, peak, produced, released = self._forward(kind, stage, source)
        for item in (produced, *released):
            self._move(item, added=item is produced)
        return Step(operation, seconds, source, produced, released, before, peak)

    def _source(self, stage: int) -> Item:
        if stage - 1 in self.activations:
            return Item(Held.ACTIVATION, stage - 1)
        if stage - 1 in self.saved:
            return Item(Held.SAVED, stage - 1)
        raise _CannotRunError(f"neither a^{stage - 1} nor abar^{stage - 1} is in memory")

    def _forward(
        self, kind: Kind, stage: int, source: Item
    ) -> tuple[float, int, Item, tuple[Item, ...]]:
        chain, index = self.chain, stage - 1
        if kind in (Kind.F_ALL, Kind.F_DROP):
            produced, present = Item(Held.SAVED, stage), stage in self.saved
            size, overhead = chain.saved_bytes[index], chain.forward_overhead_bytes[index]
            seconds = chain.forward_seconds[index]
        else:
            produced, present = Item(Held.ACTIVATION, stage), stage in self.activations
            size = chain.activation_bytes[stage]
            overhead = chain.forward_only_overhead_bytes[index]
            seconds = chain.forward_only_seconds[index]
        if present:
            raise _CannotRunError(f"{produced} is in memory already")
        if kind is Kind.F_DROP and source.held is not Held.ACTIVATION:
            raise _CannotRunError(f"a^{index} is not in memory, so it cannot be dropped")
        released = (source,) if kind in (Kind.F_NULL, Kind.F_DROP) else ()
        return seconds, self.nbytes + size + overhead, produced, released

    def _backward(self, stage: int, source: Item) -> tuple[float, int, Item, tuple[Item, ...]]:
        if self.gradient != stage:
            raise _CannotRunError(f"the gradient in memory is d^{self.gradient}, not d^{stage}")
        if stage not in self.saved:
            raise _CannotRunError(f"abar^{stage} is not in memory")
        chain, index = self.chain, stage - 1
        released = [Item(Held.GRADIENT, stage), Item(Held.SAVED, stage)]
        if source.held is Held.ACTIVATION:
            released.append(source)
        peak = self.nbytes + chain.gradient_bytes[index] + chain.backward_overhead_bytes[index]
        produced = Item(Held.GRADIENT, index)
        return chain.backward_seconds[index], peak, produced, tuple(released)

    def _move(self, item: Item, *, added: bool) -> None:
        held, stage = item
        if held is Held.GRADIENT:
            self.gradient = stage if added else self.gradient
        else:
            items = self.activations if held is Held.ACTIVATION else self.saved
            (items.add if added else items.remove)(stage)
        size = self.sizes[held][stage]
        self.nbytes += size if added else -size


class _CannotRunError(Exception):
    """Why an operation cannot run; the caller adds which one."""
