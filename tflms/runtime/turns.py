"""Decides which of the gradient computations in one traced graph make up its backward phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tflms.graph import order
from tflms.graph.ir import Graph, OpId, ValueId


@dataclass(frozen=True, slots=True)
class Turn:
    """One computation of gradients: what was differentiated, and what came out."""

    targets: tuple[ValueId, ...]
    results: tuple[ValueId, ...]


@dataclass(frozen=True, slots=True)
class _Reach:
    turn: Turn
    forward: set[OpId]
    nbytes: int


def choose(graph: Graph, turns: Sequence[Turn]) -> tuple[list[ValueId], int]:
    """Return what was differentiated in turns that do not build on one another's gradients.

    Where one turn's targets need another's gradients (a penalty on gradients; a generator that is
    trained after its critic), they have no forward phase in common: the turn with the larger
    forward phase is taken, and those that agree with it.

    Returns:
        the targets of the turns that were taken, and how many turns were left out.
    """
    found: list[_Reach] = []
    for turn in turns:
        forward = order.ancestors(graph, [graph.value(v).op for v in turn.targets])
        nbytes = sum(graph.value(v).nbytes() or 0 for op in forward for v in graph.op(op).outputs)
        found.append(_Reach(turn, forward, nbytes))
    found.sort(key=lambda reach: -reach.nbytes)  # stable: of equals, the first
    taken: list[_Reach] = []
    for reach in found:
        if all(_agree(graph, reach, other) for other in taken):
            taken.append(reach)
    targets = [target for reach in taken for target in reach.turn.targets]
    return list(dict.fromkeys(targets)), len(turns) - len(taken)


def _agree(graph: Graph, a: _Reach, b: _Reach) -> bool:
    return not _needs(graph, a, b) and not _needs(graph, b, a)


def _needs(graph: Graph, later: _Reach, earlier: _Reach) -> bool:
    """Whether the targets of one turn are computed from the gradients of another."""
    return any(graph.value(v).op in later.forward for v in earlier.turn.results)
