"""Keeps TensorFlow from fusing more than it fused before the rewrite, which would change numbers.

On CPU and GPU, Grappler's remapper turns a product and what follows into one kernel where nobody
else reads what lies between; that kernel rounds otherwise. A late reader prevents it. Where a
rewrite takes that reader away, a guard takes its place: for the user's own operations a copy that
the first recomputation waits for, for clones the attribute that keeps them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from tflms.graph import effects
from tflms.graph.erase import original
from tflms.graph.ir import Graph, OpId, Use, ValueId
from tflms.planning import kernels
from tflms.planning.cost import short_device
from tflms.rewriting.engine import Application, Engine

_FUSED_ON = ("", "CPU", "GPU")
Readers = dict[ValueId, int]


def readers(graph: Graph, ops: Sequence[OpId]) -> Readers:
    """Return how many operations read each result of some operations, before a rewrite."""
    return {
        value: len({use.op for use in graph.uses(value)})
        for op in ops
        if short_device(graph.op(op).device).partition(":")[0] in _FUSED_ON
        for value in graph.op(op).outputs
    }


def run(engine: Engine, before: Readers) -> int:
    """Guard what has lost all readers but one; return how many copies that took."""
    graph = engine.graph
    seeds = [op.id for op in graph.ops() if op.role == "seed"]
    if not seeds:
        return 0
    first = min(seeds, key=engine.place)
    count = 0
    for value, number in before.items():
        if number > 1 and _may_be_fused(graph, graph.uses(value)):
            engine.apply(Application("recompute_guard", {"v": value, "s": first}))
            count += 1
    return count


def alone(graph: Graph) -> set[OpId]:
    """Return the clones that must stay as they are: what they repeat has several readers, they one.

    Works on any rewritten graph, one that was rewritten by a saved plan too.
    """
    readers: dict[ValueId, set[OpId]] = {}
    for number in range(graph.original_ops):
        for value in graph.op(number).inputs:
            readers.setdefault(original(graph, value), set()).add(OpId(number))
    return {
        op.id
        for op in graph.ops()
        if op.role == "clone"
        and not effects.takes_shape(op.type)
        and any(
            len(readers.get(original(graph, value), ())) > 1
            and _may_be_fused(graph, graph.uses(value))
            for value in op.outputs
        )
    }


def _may_be_fused(graph: Graph, uses: Sequence[Use]) -> bool:
    """Tell whether the only reader of a value is one that may be pulled into its maker."""
    remaining = {use.op for use in uses}
    if len(remaining) != 1:
        return False
    reader = graph.op(remaining.pop())
    return reader.type not in kernels.HEADS and reader.role not in ("seed", "identity")
