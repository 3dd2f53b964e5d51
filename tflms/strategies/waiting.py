"""Makes the forward phase wait for swap-outs, so that what was parked really leaves in time.

The executor runs what is ready. Nothing that computes needs a swap-out before the backward phase,
so without an edge it may come as late as the executor and the link like: with one thread for
operations, not before the forward phase is over, and then nothing is saved. An operation a little
behind the last early use therefore waits for the copy: few values are on their way at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from tflms.graph import effects
from tflms.graph.erase import original
from tflms.graph.ir import Graph, Op, OpId, Use, ValueId
from tflms.graph.order import Phases
from tflms.planning import kernels
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies.swap import Swapped

LAYERS_BETWEEN = 1  # that may run while the copy is under way, which hides it behind their time
_LONGEST_CHAIN = 4  # of what lies between a product and where its input is held
_VISITED = 400  # operations looked at for one value before the search ends
# What reads through a copy of its handle must not lose a fusion with the operation that made it.
_MERGED_WITH_READER = frozenset(
    ["Pad", "PadV2", "Transpose", "ConjugateTranspose", "Cast", "SpaceToBatchND"]
)


def run(engine: Engine, swapped: Sequence[Swapped]) -> int:
    """Propose for every swap-out an operation that waits for it; return how many do."""
    return sum(_wait(engine, one) for one in swapped)


def _wait(engine: Engine, one: Swapped) -> bool:
    """Let the first suitable operation behind the last early use wait for one swap-out."""
    skipped = 0
    for op in _behind(engine.graph, engine.phases, one):
        use = handle_of(engine.graph, engine.phases, op, above=one.gone)
        if use is None and not _may_wait(engine.graph, engine.phases, op):
            continue
        if skipped < LAYERS_BETWEEN:
            skipped += 1
            continue
        gate = op if use is None else hold(engine, use)
        if gate is None:
            continue
        outcome = engine.apply(Application("order", {"a": one.swap_out, "b": gate}))
        if isinstance(outcome, Applied):
            return True
    return False


def _behind(graph: Graph, phases: Phases, one: Swapped) -> Iterator[OpId]:
    """Yield operations of the step that need the value, from its last early use on, by level.

    They are descendants of the value: whatever runs them runs it, and nothing can close a cycle.
    """
    level = phases.level
    guard, frame = phases.guard[graph.value(one.value).op], graph.producer(one.value).frame
    seen = {op for op in _readers(graph, graph.value(one.value).op) if phases.forward[op]}
    heap = [(level[op], op) for op in seen]
    heapq.heapify(heap)
    while heap and len(seen) < _VISITED:
        here, op = heapq.heappop(heap)
        if here > one.gone and phases.guard[op] == guard and graph.op(op).frame == frame:
            yield op
        for after in _readers(graph, op):
            if after not in seen and phases.forward[after]:
                seen.add(after)
                heapq.heappush(heap, (level[after], after))


def _readers(graph: Graph, op: OpId) -> list[OpId]:
    """The user's operations that come next, seen through copies of handles."""
    found: list[OpId] = []
    for after in graph.successors(op):
        if after < graph.original_ops:
            found.append(after)
        elif graph.op(after).role == "identity":
            found += _readers(graph, after)
    return found


def handle_of(graph: Graph, phases: Phases, op_id: OpId, *, above: int = 0) -> Use | None:
    """Return the input that a product or convolution may read through a copy, or None.

    Grappler fuses such an operation with what follows it, where no control edge touches it. A copy
    in front of it that waits in its place takes nothing from that. What Grappler merges with its
    reader (a Pad, a Transpose, a factor) or looks through (a Reshape) stays behind the copy.

    Args:
        graph: the graph.
        phases: its phases.
        op_id: the operation.
        above: what reads the copy lies above this level: then nothing that waits is needed by what
            it waits for.
    """
    if graph.op(op_id).type not in kernels.HEADS:
        return None
    for slot in range(len(graph.op(op_id).inputs)):
        use: Use | None = Use(op_id, slot)
        for _ in range(_LONGEST_CHAIN):
            assert use is not None
            value = graph.op(use.op).inputs[use.slot]
            maker = graph.producer(value)
            if maker.role == "identity":
                return use
            if maker.role or not _flows(graph, phases, value) or phases.level[use.op] <= above:
                break
            made = effects.of(maker.type)
            if made.movable and not made.view and not _merged(graph, phases, maker):
                return use
            use = _through(graph, phases, maker)
            if use is None:
                break
    return None


def _flows(graph: Graph, phases: Phases, value: ValueId) -> bool:
    """Tell whether a value is computed from data, and no shape or index."""
    return phases.activation[original(graph, value)] and graph.value(value).dtype[0] in "fbc"


def _merged(graph: Graph, phases: Phases, maker: Op) -> bool:
    """Tell whether Grappler may merge an operation with the product that reads it."""
    if maker.type == "Mul":  # a constant factor goes into the weights
        return not all(_flows(graph, phases, value) for value in maker.inputs)
    return maker.type in _MERGED_WITH_READER


def _through(graph: Graph, phases: Phases, maker: Op) -> Use | None:
    """Return the one input of an operation that the data comes from."""
    found = [slot for slot, value in enumerate(maker.inputs) if _flows(graph, phases, value)]
    return Use(maker.id, found[0]) if len(found) == 1 else None


def _may_wait(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    """Tell whether an operation may wait itself: a large kernel that nobody merges."""
    op = graph.op(op_id)
    large = any(phases.activation[v] for v in op.outputs)
    return large and effects.signals(op.type, graph.reader_types(op_id))


def hold(engine: Engine, use: Use) -> OpId | None:
    """Let an operation read an input through a copy of the handle, which can wait for others.

    A copy back from the host is one already; a second one would be in its way on the device.
    """
    graph = engine.graph
    value = graph.op(use.op).inputs[use.slot]
    if graph.producer(value).role in ("identity", "swap_in"):
        return graph.value(value).op
    outcome = engine.apply(Application("introduce_identity", {"v": value, "uses": (use,)}))
    return OpId(outcome.made["i"]) if isinstance(outcome, Applied) else None
