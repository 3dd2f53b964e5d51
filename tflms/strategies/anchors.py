"""Chooses the anchor that a swap-in waits for: ``direct_order`` and ``chain_rule``.

After arXiv 1807.02037, section 5, with the original's faults put right; what differs, and why, is
said in ``docs/explanation/differences.md``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from tflms.graph import effects
from tflms.graph.ir import Graph, OpId, ValueId
from tflms.graph.order import Phases, Reach


@dataclass(frozen=True, slots=True)
class Search:
    """What the search for anchors looks at."""

    graph: Graph
    phases: Phases
    reach: Reach
    lb: int
    ub: int

    def eligible(self, op: OpId, use: OpId, after: int) -> bool:
        """Tell whether an operation may serve as an anchor for a use.

        It makes an activation-sized tensor (a shape computation would fire long before its level)
        in a kernel that nobody merges with others (waiting for it changes no number), lies behind
        ``after``, lives in the frame and branches of the use, and belongs to the backward phase if
        the use does.
        """
        graph, phases = self.graph, self.phases
        if op >= graph.original_ops or phases.level[op] <= after:
            return False
        if phases.late(use) and not phases.late(op):
            return False
        node = graph.op(op)
        if node.frame != graph.op(use).frame or not phases.guard[op] <= phases.guard[use]:
            return False
        if not effects.signals(node.type, graph.reader_types(op)):
            return False
        return any(_is_signal(graph, phases, value) for value in node.outputs)

    def weight(self, op: OpId) -> tuple[int, int]:
        """Order anchors of one level: the largest result first, then the smallest id."""
        outputs = self.graph.op(op).outputs
        size = max((self.graph.value(v).nbytes() or 0 for v in outputs), default=0)
        return (size, -op)


def _is_signal(graph: Graph, phases: Phases, value: ValueId) -> bool:
    v = graph.value(value)
    return phases.activation[value] and v.dtype[0] in "fbc" and v.dtype != "bool" and v.shape != ()


def direct_order(search: Search, value: ValueId, use: OpId, after: int) -> OpId | None:
    """Return the ancestor of a use that lies closest to ``lb`` levels before it, or None.

    Levels are searched from ``lb`` to ``ub`` before the use, down to ``after`` exclusively.
    """
    level, graph = search.phases.level, search.graph
    nearest, farthest = level[use] - search.lb, max(level[use] - search.ub, after + 1)
    heap = [(-level[p], p) for p in graph.predecessors(use) if p < graph.original_ops]
    heapq.heapify(heap)
    seen = {p for _, p in heap}
    best: OpId | None = None
    while heap:
        minus, op = heapq.heappop(heap)
        here = -minus
        if here < farthest or (best is not None and here < level[best]):
            break
        if (
            here <= nearest
            and search.eligible(op, use, after)
            and (best is None or search.weight(op) > search.weight(best))
        ):
            best = op
        for before in graph.predecessors(op):
            if before not in seen and before < graph.original_ops and level[before] >= farthest:
                seen.add(before)
                heapq.heappush(heap, (-level[before], before))
    return best


def chain_rule(search: Search, value: ValueId, use: OpId, after: int) -> OpId | None:
    """Return the backward operation that belongs to the forward one ``lb`` hops behind the value.

    Breadth-first over forward operations, hop by hop; from hop ``lb`` on, the late operations that
    read what the visited ones made are candidates if they reach the use and lie ``lb`` to ``ub``
    levels before it. The first hop that has any decides; of its candidates, the one closest to the
    use. Near the turn from forward to backward there is no such hop: ``direct_order`` decides.
    """
    graph, phases = search.graph, search.phases
    level = phases.level
    if level[use] - search.lb < phases.backward_start:
        return direct_order(search, value, use, after)
    front = [u.op for u in graph.uses(value) if u.op < graph.original_ops and phases.forward[u.op]]
    front = list(dict.fromkeys(front))
    seen = set(front)
    for hop in range(1, search.ub + 1):
        if not front:
            break
        if hop >= search.lb:
            found = [
                op
                for op in _late_readers(graph, phases, front)
                if search.lb <= level[use] - level[op] <= search.ub
                and search.eligible(op, use, after)
            ]
            for op in sorted(found, key=lambda o: (-level[o], *(-w for w in search.weight(o)))):
                if search.reach.precedes(op, use):
                    return op
        following: list[OpId] = []
        for op in front:
            for after_op in graph.successors(op):
                if (
                    after_op < graph.original_ops
                    and phases.forward[after_op]
                    and after_op not in seen
                ):
                    seen.add(after_op)
                    following.append(after_op)
        front = following
    return direct_order(search, value, use, after)


def _late_readers(graph: Graph, phases: Phases, front: list[OpId]) -> list[OpId]:
    found: dict[OpId, None] = {}
    for op in front:
        for value in graph.op(op).outputs:
            for reader in _readers(graph, value):
                if reader < graph.original_ops and phases.late(reader):
                    found[reader] = None
    return list(found)


def _readers(graph: Graph, value: ValueId) -> list[OpId]:
    """Operations that read a value, copies seen through."""
    found: list[OpId] = []
    stack = [value]
    while stack:
        for use in graph.uses(stack.pop()):
            op = graph.op(use.op)
            if op.role in ("swap_out", "swap_in", "identity"):
                stack += op.outputs
            else:
                found.append(use.op)
    return found


Anchors = Callable[[Search, ValueId, OpId, int], OpId | None]
BY_NAME: dict[str, Anchors] = {"chain_rule": chain_rule, "direct_order": direct_order}
