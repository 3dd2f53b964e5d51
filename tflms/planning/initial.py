"""Knows which constants stay on the device because variables were started with them."""

from __future__ import annotations

from dataclasses import dataclass

from tflms.graph.erase import original
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import as_made
from tflms.planning import kernels
from tflms.planning.allocator import rounded
from tflms.planning.cost import Sizes


@dataclass(frozen=True, slots=True)
class Initial:
    """Constants that variables were started with: their bytes, and the handles of the variables."""

    nbytes: tuple[int, ...]
    sharing: tuple[ValueId, ...]


def initial_constants(graph: Graph, weights: Sizes, within: set[OpId]) -> Initial:
    """Find the constants that a session keeps of what its initialisation was compiled to.

    Equal ones are merged where they are colocated (``common_subgraph_elimination.cc`` compares all
    attributes, the colocation too): the zeros that both of Adam's slots of a weight start with,
    not those of two weights. Random starting values are computed and go.

    Args:
        graph: with the operations that start variables.
        weights: of this very graph.
        within: the operations that a step runs.
    """
    outside = as_made(graph, (op.id for op in graph.ops() if op.id not in within))
    constant = kernels.folded(graph, outside)
    kinds: dict[tuple[object, ...], int] = {}
    sharing: dict[ValueId, None] = {}
    for op_id in outside:
        op = graph.op(op_id)
        if op.type not in ("AssignVariableOp", "Assign") or not weights.on_device[op_id]:
            continue
        v = graph.value(original(graph, op.inputs[1]))
        if v.op not in constant:
            continue
        source = graph.op(v.op)
        what = source.attrs.get("equal_to", v.op)
        kinds[(what, v.index, source.colocation)] = rounded(weights.nbytes[v.id])
        if op.type == "AssignVariableOp" and v.id == op.inputs[1]:
            sharing[op.inputs[0]] = None
    return Initial(tuple(kinds.values()), tuple(sharing))
