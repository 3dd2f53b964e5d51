"""Knows what no plan can go below: the most demanding operation beside the persistent state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tflms import units
from tflms.errors import InfeasibleError
from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.planning import kernels
from tflms.planning.allocator import rounded
from tflms.planning.cost import Costs, Sizes


@dataclass(frozen=True, slots=True)
class Floor:
    """The least memory that any plan needs, and why.

    Attributes:
        nbytes: persistent state and all that the most demanding operation has to hold.
        persistent_bytes: variables and constants.
        op: that operation.
        operands: what it reads and makes, largest first, with bytes.
        workspace_bytes: its scratch memory.
    """

    nbytes: int
    persistent_bytes: int
    op: OpId | None
    operands: tuple[tuple[ValueId, int], ...]
    workspace_bytes: int


def floor(
    graph: Graph, weights: Sizes, costs: Costs, order: Sequence[OpId], persistent_bytes: int
) -> Floor:
    """Find the operation that holds most: operands, results that need a buffer, workspace."""
    folded = kernels.folded(graph, order)
    best: tuple[int, OpId | None, list[tuple[ValueId, int]], int] = (0, None, [], 0)
    for op_id in order:
        op = graph.op(op_id)
        if op.role or op_id in folded or not weights.on_device[op_id]:
            continue
        facts = effects.of(op.type)
        held: dict[ValueId, int] = {}
        for value in op.inputs:
            source = graph.producer(value)
            if source.id not in folded and not effects.of(source.type).reads:
                held[value] = rounded(weights.nbytes[value])
        largest_input = max(held.values(), default=0)
        if not facts.view and not facts.reads:
            for index, value in enumerate(op.outputs):
                nbytes = rounded(weights.nbytes[value])
                taken = op.type in kernels.FORWARDING and index == 0 and nbytes <= largest_input
                held[value] = 0 if taken else nbytes
        scratch = costs.workspace[op_id] if op_id < len(costs.workspace) else 0
        total = sum(held.values()) + scratch
        if total > best[0]:
            best = (total, op_id, sorted(held.items(), key=lambda i: (-i[1], i[0])), scratch)
    operands = tuple(item for item in best[2] if item[1])
    return Floor(best[0] + persistent_bytes, persistent_bytes, best[1], operands, best[3])


def refuse(
    graph: Graph,
    found: Floor,
    limit: int,
    minimum: int | None = None,
    *,
    host_limit: int | None = None,
) -> InfeasibleError:
    """Return the error for a limit that cannot be kept.

    Args:
        graph: the graph.
        found: its floor.
        limit: bytes that were asked for.
        minimum: bytes; the smallest limit that is known to be kept, if any is.
        host_limit: bytes that may be parked, if that is limited.
    """
    size = units.format_bytes
    name = graph.op(found.op).name if found.op is not None else "the step"
    operands = [(graph.value_name(v), n) for v, n in found.operands]
    listed = ", ".join(f"{n} {size(b)}" for n, b in operands[:6])
    parks = "" if host_limit is None else f" and parks at most {size(host_limit)}"
    if limit < found.nbytes:
        cause = (
            f"{name!r} alone needs {size(found.nbytes - found.persistent_bytes)} at once "
            f"({listed}) beside {size(found.persistent_bytes)} of variables and constants"
        )
    else:
        cause = (
            f"no plan was found that keeps it{parks}; the floor is {size(found.nbytes)}, at "
            f"{name!r} ({listed}) beside {size(found.persistent_bytes)} of variables and constants"
        )
    known = "No limit was found that can be kept"
    if minimum is not None:
        known = f"The smallest limit that was found to be kept is {minimum} bytes"
    helps = "a smaller batch or a smaller input lowers it"
    if host_limit is not None:
        helps += f", and so may a host_memory_limit above {size(host_limit)}"
    return InfeasibleError(
        f"memory_limit is {size(limit)} ({limit} bytes), but {cause}. {known}; {helps}",
        minimum_bytes=minimum,
        op=name,
        operands=operands,
        persistent_bytes=found.persistent_bytes,
        floor_bytes=found.nbytes,
    )
