"""When things happen: levels, reachability and phases, from edges and never from names."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tflms.errors import GraphError, InvariantError
from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId

# A constant of at least this many bytes counts as data that activations are computed from.
DATA_CONSTANT_NBYTES = 1024


def topological(graph: Graph) -> list[OpId]:
    """Return the operations so that each comes after what it waits for (smallest ids first).

    Raises:
        InvariantError: read and control edges close a cycle; the message shows one.
    """
    waiting = [0] * graph.size
    ready: deque[OpId] = deque()
    for op in graph.ops():
        waiting[op.id] = len(graph.predecessors(op.id))
        if not waiting[op.id]:
            ready.append(op.id)
    order: list[OpId] = []
    while ready:
        op_id = ready.popleft()
        order.append(op_id)
        for after in graph.successors(op_id):
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    if len(order) < len(graph):
        cycle = " -> ".join(repr(graph.op(op).name) for op in _some_cycle(graph, order))
        raise InvariantError(f"read and control edges close a cycle: {cycle}")
    return order


def as_made(graph: Graph, within: Iterable[OpId]) -> list[OpId]:
    """Return operations in a topological order that follows the one in which they were made."""
    waiting = dict.fromkeys(within, 0)
    for op in waiting:
        waiting[op] = sum(p in waiting for p in graph.predecessors(op))
    ready = [op for op, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[OpId] = []
    while ready:
        op = heapq.heappop(ready)
        order.append(op)
        for after in graph.successors(op):
            if after in waiting:
                waiting[after] -= 1
                if not waiting[after]:
                    heapq.heappush(ready, after)
    return order


def _some_cycle(graph: Graph, ordered: Sequence[OpId]) -> list[OpId]:
    done = set(ordered)
    here = next(op.id for op in graph.ops() if op.id not in done)
    path: dict[OpId, None] = {}
    while here not in path:
        path[here] = None
        here = next(p for p in graph.predecessors(here) if p not in done)
    nodes = list(path)
    return [*reversed(nodes[nodes.index(here) :]), nodes[-1]]


def ancestors(graph: Graph, targets: Iterable[OpId]) -> set[OpId]:
    """Return all that must run for the targets to run, the targets included."""
    found = set(targets)
    stack = list(found)
    while stack:
        for before in graph.predecessors(stack.pop()):
            if before not in found:
                found.add(before)
                stack.append(before)
    return found


def levels(graph: Graph, order: Sequence[OpId], within: set[OpId]) -> list[int]:
    """Return for each operation the length of the longest way to it from a source; -1 outside."""
    level = [-1] * graph.size
    for op in order:
        if op in within:
            level[op] = 1 + max((level[p] for p in graph.predecessors(op)), default=-1)
    return level


def guards(graph: Graph, order: Sequence[OpId]) -> list[frozenset[tuple[ValueId, int]]]:
    """Return the v1 branches that each operation lives in, as (predicate, output slot) of Switch.

    An operation is dead where one of its guards is not taken. A Merge lives where all of its
    inputs have their guards in common.
    """
    empty: frozenset[tuple[ValueId, int]] = frozenset()
    found = [empty] * graph.size
    if not any(op.type in ("Switch", "RefSwitch") for op in graph.ops()):
        return found
    for op_id in order:
        op = graph.op(op_id)
        if op.type in ("Merge", "RefMerge"):
            sets = [_guard_of(graph, found, v) for v in op.inputs
                    if graph.orders(graph.value(v).op, op_id)]  # fmt: skip
            found[op_id] = frozenset.intersection(*sets) if sets else empty
            continue
        mine = empty
        for value in op.inputs:
            mine |= _guard_of(graph, found, value)
        for before in op.controls:
            mine |= found[before]
        found[op_id] = mine
    return found


def _guard_of(
    graph: Graph, found: list[frozenset[tuple[ValueId, int]]], value: ValueId
) -> frozenset[tuple[ValueId, int]]:
    v = graph.value(value)
    op = graph.op(v.op)
    if op.type in ("Switch", "RefSwitch"):
        return found[op.id] | {(op.inputs[1], v.index)}
    return found[op.id]


@dataclass(frozen=True, slots=True)
class Phases:
    """Levels and phases of the part of a graph that one training step runs.

    Attributes:
        order: all operations, topologically.
        level: longest way from a source, -1 outside of the step.
        step: whether the operation takes part in the training step.
        forward: whether it belongs to the forward phase (the loss and all that it needs).
        backward_start: the level behind the deepest activation that the backward phase reads.
        activation: per value, whether it is computed from data and not from variables alone.
        guard: per operation, the v1 branches that it lives in.
        needed_by: per operation, a bit for each target (fetch, or end of the graph) that needs it.
        targets: what the step is run for.
    """

    order: tuple[OpId, ...]
    level: tuple[int, ...]
    step: tuple[bool, ...]
    forward: tuple[bool, ...]
    backward_start: int
    activation: tuple[bool, ...]
    guard: tuple[frozenset[tuple[ValueId, int]], ...]
    needed_by: tuple[int, ...] = ()
    targets: frozenset[OpId] = frozenset()

    def late(self, op: OpId) -> bool:
        """Tell whether an operation belongs to the backward phase or comes after it."""
        return self.step[op] and not self.forward[op] and self.level[op] >= self.backward_start


def phases(
    graph: Graph,
    *,
    loss: ValueId | Sequence[ValueId] | None = None,
    targets: Sequence[OpId] = (),
    whole: bool = False,
) -> Phases:
    """Find the phases of a training step by reachability.

    With a loss, or several, the forward phase is all that they need. Without one it is the set of
    operations up to the level across which most bytes of activations stay alive: that is the turn
    from forward to backward. The step is what the targets need; without targets they are the
    operations that overwrite a variable with something computed from activations. ``whole`` says
    that every run needs all of the targets, as it is with functions.

    Raises:
        GraphError: nothing behind the forward phase reads an activation (no gradients).
        InvariantError: the graph has a cycle.
    """
    order = topological(graph)
    active = _activations(graph, order)
    wanted = list(targets) if targets else _writers(graph, order, active)
    losses = [] if loss is None else [loss] if isinstance(loss, int) else list(loss)
    wanted += [graph.value(v).op for v in losses]
    step = ancestors(graph, wanted)
    level = levels(graph, order, step)
    if losses:
        forward = ancestors(graph, [graph.value(v).op for v in losses])
    else:
        widest = _turn(graph, level, active)
        forward = {op for op in step if level[op] <= widest}
    # The deepest activation that something behind the forward phase reads marks the turn. What is
    # behind the forward phase and yet above the turn (moving averages, shapes) runs early.
    turn = max(
        (
            level[op]
            for op in step & forward
            for value in graph.op(op).outputs
            if active[value] and graph.value(value).is_tensor and graph.value(value).shape != ()
            if any(u.op in step and u.op not in forward for u in graph.value(value).uses)
        ),
        default=-1,
    )
    if turn < 0:
        where = repr(graph.value_name(losses[0])) if losses else "the graph"
        raise GraphError(
            f"no gradient ops reach back from {where}: nothing behind the forward phase reads an "
            "activation; pass the tensor that the gradients were taken of as loss=, and the train "
            "op among fetches="
        )
    ids = range(graph.size)
    return Phases(
        order=tuple(order),
        level=tuple(level),
        step=tuple(i in step for i in ids),
        forward=tuple(i in forward for i in ids),
        backward_start=turn + 1,
        activation=tuple(active),
        guard=tuple(guards(graph, order)),
        needed_by=(
            tuple(int(i in step) for i in ids) if whole else _needed_by(graph, order, targets)
        ),
        targets=frozenset(wanted),
    )


def _needed_by(graph: Graph, order: Sequence[OpId], targets: Sequence[OpId]) -> tuple[int, ...]:
    """Per operation, the set of targets that need it, as bits; no targets means all ends."""
    ends = list(targets) or [op for op in order if not graph.successors(op)]
    needed = [0] * graph.size
    for bit, end in enumerate(dict.fromkeys(ends)):
        needed[end] |= 1 << bit
    for op in reversed(order):
        for before in graph.predecessors(op):
            needed[before] |= needed[op]
    return tuple(needed)


def replaced(graph: Graph) -> set[OpId]:
    """Return the user's operations that the step no longer runs: the host does what they did."""
    joins = (op.origin for op in graph.ops() if op.role == "swap_join")
    return {origin for origin in joins if origin is not None}


def with_edges(
    graph: Graph, order: Sequence[OpId], edges: Sequence[tuple[OpId, OpId]]
) -> list[OpId] | None:
    """Return an order that also runs ``a`` before ``b`` for each edge; None on a cycle."""
    after: dict[OpId, list[OpId]] = {}
    waiting = [0] * graph.size
    for a, b in edges:
        after.setdefault(a, []).append(b)
        waiting[b] += 1
    place = {op: i for i, op in enumerate(order)}
    for op in order:
        waiting[op] += len(graph.predecessors(op))
    ready = [place[op] for op in order if not waiting[op]]
    heapq.heapify(ready)
    found: list[OpId] = []
    while ready:
        op = order[heapq.heappop(ready)]
        found.append(op)
        for follower in (*graph.successors(op), *after.get(op, ())):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, place[follower])
    return found if len(found) == len(order) else None


def _activations(graph: Graph, order: Sequence[OpId]) -> list[bool]:
    """Per value: is it computed from data (a feed, an iterator, a large constant)?"""
    active = [False] * graph.value_count
    for op_id in order:
        op = graph.op(op_id)
        if not op.inputs:
            data = not effects.owns_variable(op.type) and (
                op.type != "Const"
                or any((graph.value(v).nbytes() or 0) >= DATA_CONSTANT_NBYTES for v in op.outputs)
            )
        else:
            data = any(active[v] for v in op.inputs)
            if not data and not effects.of(op.type).known:
                data = True  # an iterator's batch comes out of an opaque handle
        for value in op.outputs:
            kind = graph.value(value)
            active[value] = data and (kind.is_tensor or kind.dtype == "variant")
    return active


def _writers(graph: Graph, order: Sequence[OpId], active: Sequence[bool]) -> list[OpId]:
    """Operations that overwrite a variable with something that depends on data and on variables.

    An initial value depends on no variable; where nothing else is written, it counts after all.
    """
    learned = [False] * graph.value_count
    for op_id in order:
        op = graph.op(op_id)
        known = effects.of(op.type)
        mine = bool(known.reads) or any(learned[v] or graph.value(v).is_ref for v in op.inputs)
        for value in op.outputs:
            learned[value] = mine and graph.value(value).is_tensor
    found = [
        op.id
        for op in graph.ops()
        if effects.of(op.type).writes and any(active[v] for v in op.inputs)
    ]
    return [op for op in found if any(learned[v] for v in graph.op(op).inputs)] or found


def _turn(graph: Graph, level: Sequence[int], active: Sequence[bool]) -> int:
    """Return the level across which most bytes of activations are alive."""
    top = max(level, default=-1)
    change = [0] * (top + 3)
    for op in graph.ops():
        if level[op.id] < 0:
            continue
        for value in op.outputs:
            v = graph.value(value)
            last = max((level[use.op] for use in v.uses), default=-1)
            if active[value] and v.is_tensor and last > level[op.id]:
                nbytes = v.nbytes() or 1
                change[level[op.id]] += nbytes
                change[last] -= nbytes
    best, best_level, alive = -1, 0, 0
    for at in range(top + 1):
        alive += change[at]
        if alive > best:
            best, best_level = alive, at
    return best_level


class Reach:
    """Answers "does a come before b?" on the current graph, by a search that levels prune."""

    def __init__(self, graph: Graph, position: Sequence[int]) -> None:
        self._graph = graph
        self._position = position  # a topological position of each user operation

    def precedes(self, source: OpId, target: OpId) -> bool:
        """Tell whether the source must run before the target (not: is the same)."""
        graph, position = self._graph, self._position
        limit = position[target] if target < len(position) else None
        stack, seen = [source], {source}
        while stack:
            for after in graph.successors(stack.pop()):
                if after == target:
                    return True
                if after in seen:
                    continue
                if limit is not None and after < len(position) and position[after] >= limit:
                    continue
                seen.add(after)
                stack.append(after)
        return False
