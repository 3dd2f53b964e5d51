"""Fixes the order of what touches much memory: which operations may wait for which others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases
from tflms.planning import kernels
from tflms.planning.cost import Sizes, device_kind
from tflms.rewriting.engine import Application, Applied, Engine
from tflms.strategies import biases

_FEW = 10  # one of so many operations
# Where no edge is in the way, Grappler moves scalars through rows of products and regroups norms:
# what optimizers do with gradients. An edge there would change the last bits.
_SCALED = frozenset(["Mul", "Div", "RealDiv", "DivNoNan"])
_NORMS = frozenset(["Square", "Sum", "L2Loss"])


@dataclass(frozen=True, slots=True)
class Chain:
    """The operations whose order is fixed, and what each of them may be made to wait for.

    Attributes:
        ops: in planned order.
        heads: first operations of what the runtime may fuse; they wait by their input alone.
        needed: per operation id, the targets that need it, as bits.
        feeds: per operation id, the placeholders that it depends on, as bits; what the loss does
            not need depends on all that the loss depends on, for no run has gradients without it.
            Arguments of a function, which every call has, do not count.
        firm: those of both that all later ones wait for which run whenever they do. Others, such as
            gradients' shapes of a batch of unknown size, may come late: nothing is held up by them.
        merged: gradients of biases, and those of weights whose kernels make them in passing.
    """

    ops: tuple[OpId, ...]
    heads: tuple[OpId, ...]
    needed: Sequence[int]
    feeds: Sequence[int]
    firm: frozenset[OpId]
    merged: Mapping[OpId, OpId]

    def following(self) -> dict[OpId, OpId]:
        """Return, per operation, the next in line that holds up what comes behind it."""
        found: dict[OpId, OpId] = {}
        after: OpId | None = None
        for op in reversed(self.ops):
            if after is not None:
                found[op] = after
            after = op if op in self.firm else after
        return found

    def may_wait(self, op: OpId, before: OpId) -> bool:
        """Tell whether waiting drags nothing into a run that would do without it.

        What is fetched in other runs is not known; that they feed what they fed before is.
        """
        return not (self.needed[op] & ~self.needed[before] or self.feeds[before] & ~self.feeds[op])


def chain(
    graph: Graph,
    phases: Phases,
    weights: Sizes,
    order: Sequence[OpId],
    least: int,
    *,
    default_kind: str = "CPU",
) -> Chain:
    """Find the memory-significant operations of a step: those that touch ``least`` bytes.

    ``default_kind`` is the kind of device of operations that name none.
    """
    folded = kernels.folded(graph, order)
    merged = {op: weight for weight, op, _ in biases.merged(graph, order, default_kind)}
    touching = [
        op_id
        for op_id in order
        if op_id < graph.original_ops
        and op_id not in folded
        and op_id not in merged
        and weights.on_device[op_id]
        and _orderable(graph, phases, op_id)
        and any(weights.nbytes[v] >= least for v in _touched(graph, phases, op_id, folded))
    ]
    fused = {op for op in touching if _may_be_fused(graph, phases, op, default_kind)}
    ops = [op for op in touching if op not in fused]
    heads = [op for op in touching if op in fused and graph.op(op).type in kernels.HEADS]
    feeds = _feeds(graph, order)
    of_loss = 0
    for op in order:
        if op < graph.original_ops and phases.forward[op]:
            of_loss |= feeds[op]
    for op in order:
        if op < graph.original_ops and not phases.forward[op]:
            feeds[op] |= of_loss
    others = fused.difference(heads)
    firm = _firm([op for op in touching if op not in others], fused, phases, feeds)
    return Chain(tuple(ops), tuple(heads), phases.needed_by, feeds, firm, merged)


def _firm(
    line: Sequence[OpId], fused: Container[OpId], phases: Phases, feeds: Sequence[int]
) -> frozenset[OpId]:
    """Those of a line that all waits for which comes later, runs with them and is no side matter.

    Of what runs in the same runs, what depends on other placeholders than most do is a side matter.
    """
    counts = Counter((phases.needed_by[op], feeds[op]) for op in line)
    most: dict[int, int] = {}  # per targets, the placeholders that most depend on
    for (needed, fed), _ in counts.most_common():
        most.setdefault(needed, fed)
    found: set[OpId] = set()
    later: set[int] = set()  # the targets that need what comes later
    for op in reversed(line):
        needed, fed = phases.needed_by[op], feeds[op]
        over = (by for by in later if by & needed == needed)
        if all(by == needed and not fed & ~most[by] for by in over):
            found.add(op)
        if op not in fused and fed == most[needed]:
            later.add(needed)
    return frozenset(found)


def _may_be_fused(graph: Graph, phases: Phases, op_id: OpId, default_kind: str) -> bool:
    """Tell whether Grappler may fuse an operation with its neighbours.

    It does so (MatMul, BiasAdd and Tanh to one kernel) only where no control edge touches them,
    and the fused kernel rounds otherwise: results would change with the plan.
    """
    if kernels.in_sum_of_sums(graph, op_id):
        return True
    kind = device_kind(graph.op(op_id).device, default_kind)
    return kind in ("CPU", "GPU") and (
        phases.forward[op_id] or kernels.in_fusible_group(graph, op_id)
    )


def _orderable(graph: Graph, phases: Phases, op_id: OpId) -> bool:
    op = graph.op(op_id)
    facts = effects.of(op.type)
    if op.frame or phases.guard[op_id] or facts.view or op.type in effects.CONTROL_FLOW:
        return False
    return not (op.type in _NORMS or (op.type in _SCALED and _by_scalar(graph, op_id)))


def _by_scalar(graph: Graph, op_id: OpId) -> bool:
    """Tell whether one operand is a scalar: a learning rate, the factor of a clipped norm."""
    return any(graph.value(v).shape == () for v in graph.op(op_id).inputs)


def _touched(graph: Graph, phases: Phases, op_id: OpId, folded: set[OpId]) -> list[ValueId]:
    """What an operation makes and reads; in the backward phase, weights too.

    An update that runs while a gradient still reads its weight copies the weight first.
    """
    op = graph.op(op_id)
    early = phases.forward[op_id]
    read = [v for v in op.inputs if not (early and effects.of(graph.producer(v).type).reads)]
    return [*op.outputs, *(v for v in read if graph.value(v).op not in folded)]


def _feeds(graph: Graph, order: Sequence[OpId]) -> list[int]:
    feeds = [0] * graph.size
    count = 0
    for op_id in order:
        op = graph.op(op_id)
        fed = op.type == "Placeholder" and "argument" not in op.attrs
        if fed and graph.value(op.outputs[0]).is_tensor:
            feeds[op_id] = 1 << count
            count += 1
        for before in graph.predecessors(op_id):
            feeds[op_id] |= feeds[before]
    return feeds


def fix_order(engine: Engine, links: Chain) -> int:
    """Put control edges between operations in planned order that nothing orders yet.

    Operations that the same targets need and that depend on the same placeholders may all wait for
    each other: they make one line, and each waits for the last of every line that it may wait for.

    Returns:
        how many edges were added.
    """
    added = 0
    last: dict[tuple[int, int], tuple[int, OpId]] = {}

    def follow(op: OpId, before: OpId) -> bool:
        """Tell whether an operation comes after another one, which an edge may have to see to."""
        nonlocal added
        if engine.reach.precedes(before, op):
            return True
        outcome = engine.apply(Application("order", {"a": before, "b": op}))
        added += isinstance(outcome, Applied)
        return isinstance(outcome, Applied)

    for place, op in enumerate(links.ops):
        line = (links.needed[op], links.feeds[op])
        known = -1  # what came before this place is in order with the line's last, and so with op
        for at, before in sorted(last.values(), reverse=True):
            if at > known and links.may_wait(op, before) and follow(op, before):
                known = at if before == last.get(line, (0, None))[1] else known
        last[line] = (place, op)
    return added


def deferred(graph: Graph, links: Chain, planned: Sequence[OpId]) -> list[OpId] | None:
    """The planned order with what most of the step does without at its end; None: no such thing.

    The loss that is fetched beside the updates is an example: no edge may make the updates wait.
    """
    counts: dict[int, int] = {}
    for op in links.ops:
        counts[links.needed[op]] = counts.get(links.needed[op], 0) + 1
    main = max(counts, key=lambda bits: (counts[bits], -bits), default=0)
    apart = [op for op in planned if op < graph.original_ops and links.needed[op] & main != main]
    if not apart or len(apart) > len(planned) // _FEW:
        return None
    later = set(apart)
    return [*(op for op in planned if op not in later), *apart]
