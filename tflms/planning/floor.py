"""Knows what no plan can go below: the most demanding operation beside the persistent state."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from tflms import units
from tflms.errors import InfeasibleError
from tflms.graph import effects
from tflms.graph.erase import original
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


@dataclass(frozen=True, slots=True)
class Demand:
    """What an operation has to hold at once.

    Attributes:
        op: the operation.
        nbytes: of all that it reads and makes, and of its scratch memory.
        operands: what it reads and makes, with bytes; what takes over a buffer has none.
        workspace_bytes: its scratch memory.
    """

    op: OpId
    nbytes: int
    operands: tuple[tuple[ValueId, int], ...]
    workspace_bytes: int


def demands(graph: Graph, weights: Sizes, costs: Costs, order: Sequence[OpId]) -> list[Demand]:
    """Return what each of the user's operations on the device holds, in order."""
    folded = kernels.folded(graph, order)
    return [
        _demand(graph, weights, costs, op_id, folded)
        for op_id in order
        if not graph.op(op_id).role and op_id not in folded and weights.on_device[op_id]
    ]


def _demand(
    graph: Graph, weights: Sizes, costs: Costs, op_id: OpId, folded: Container[OpId]
) -> Demand:
    op = graph.op(op_id)
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
    return Demand(op_id, sum(held.values()) + scratch, tuple(held.items()), scratch)


def floor(
    graph: Graph, weights: Sizes, costs: Costs, order: Sequence[OpId], persistent_bytes: int
) -> Floor:
    """Find the operation that holds most: operands, results that need a buffer, workspace."""
    found = demands(graph, weights, costs, order)
    most = max(found, key=lambda demand: demand.nbytes, default=None)
    if most is None:
        return Floor(persistent_bytes, persistent_bytes, None, (), 0)
    named = ((original(graph, v), nbytes) for v, nbytes in most.operands if nbytes)
    operands = sorted(named, key=lambda o: (-o[1], o[0]))
    return Floor(
        most.nbytes + persistent_bytes, persistent_bytes, most.op, tuple(operands),
        most.workspace_bytes,
    )  # fmt: skip


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
