"""From a solved table back to the operations, with memory counted in bytes rather than in slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tflms.checkpointing.floors import Floors
from tflms.checkpointing.grid import Grid
from tflms.checkpointing.operations import Kind, Operation
from tflms.checkpointing.problem import (
    HEAD,
    PLAIN,
    TAIL,
    Floats,
    Form,
    Problem,
    Split,
    splits_of,
)
from tflms.checkpointing.table import Table
from tflms.errors import InvariantError

_LEAVES = {
    PLAIN: (Kind.F_ALL, Kind.B),
    HEAD: (Kind.F_DROP,),
    TAIL: (Kind.B,),
}


@dataclass(frozen=True, slots=True)
class _Part:
    """A subproblem and the bytes that are left for it beside a^(s-1)."""

    form: Form
    s: int
    t: int
    nbytes: int


def rebuild(
    problem: Problem, floors: Floors, grid: Grid, table: Table, limit: int
) -> list[Operation]:
    """Return the operations of the best schedule that the table knows.

    The choices are not stored; each is found again, with the memory that is truly left, and
    only where the parts fit to the byte: the peak is within the limit. Where sizes were rounded
    up, there is never less memory than the table assumed, so the schedule takes at most the time
    that the table promises. A stack of our own stands in for recursion: chains of thousands of
    stages do not overflow it.

    Args:
        problem: the chain's.
        floors: of its subproblems.
        grid: of the table.
        table: filled.
        limit: bytes beside the chain's input; from ``grid.least`` to ``grid.limit``.
    """
    chooser = _Chooser(problem, floors, grid, table)
    operations: list[Operation] = []
    todo: list[_Part | Operation] = [_Part(PLAIN, 1, problem.stages, limit)]
    while todo:
        item = todo.pop()
        if isinstance(item, Operation):
            operations.append(item)
        else:
            todo.extend(reversed(chooser.expand(item)))
    return operations


class _Chooser:
    """Finds the best first step of a subproblem."""

    def __init__(self, problem: Problem, floors: Floors, grid: Grid, table: Table) -> None:
        self.problem, self.floors, self.grid, self.table = problem, floors, grid, table
        self.forms = tuple(table.flat)
        self.output = grid.stored(problem.output)  # as the table counts it

    def expand(self, part: _Part) -> list[_Part | Operation]:
        """Return what a subproblem becomes: operations and smaller subproblems, in order."""
        form, s, t = part.form, part.s, part.t
        if s == t:
            return [Operation(kind, s) for kind in _LEAVES[form]]
        least, steps = self._saving(part)
        for split in splits_of(form, self.forms):
            excess = self._splitting(part, split)
            position = int(np.argmin(excess))
            if excess[position] < least:
                least = float(excess[position])
                steps = self._split_steps(part, split, s + 1 + position)
        if least == np.inf:
            raise InvariantError(
                f"stages {s} to {t} ({form}) fit in no way in {part.nbytes} bytes, though the "
                "table says they do; this is a bug of the solver"
            )
        return steps

    def _saving(self, part: _Part) -> tuple[float, list[_Part | Operation]]:
        problem, form, s, t = self.problem, part.form, part.s, part.t
        left = part.nbytes - problem.save_shift(form, s)
        rest = Form(False, form.tail_saved)
        if not problem.saving or left < 0 or part.nbytes < problem.save_need(form, s, t):
            return np.inf, []
        steps: list[_Part | Operation] = [
            Operation(Kind.F_DROP if form.head_dropped else Kind.F_ALL, s),
            _Part(rest, s + 1, t, left),
        ]
        if not form.head_dropped:
            steps.append(Operation(Kind.B, s))
        starts = np.array([s + 1])
        return float(self._excess(rest, starts, np.array([t]), np.array([left]))[0]), steps

    def _splitting(self, part: _Part, split: Split) -> Floats:
        """Return the excess of each split s' = s + 1..t."""
        problem, form, s, t = self.problem, part.form, part.s, part.t
        at = np.arange(s + 1, t + 1)
        right_bytes = part.nbytes - problem.output[at - 1]
        right = self._excess(split.right, at, np.full_like(at, t), right_bytes)
        left_ends = at - 1 + split.overlap
        left = np.full(len(at), np.inf)
        known = np.ones(len(at), bool)
        if split.overlap and form.tail_saved:  # stage t is saved: it cannot be s'
            known[-1] = False
        left[known] = self._excess(
            split.left,
            np.full(int(known.sum()), s),
            left_ends[known],
            np.full(int(known.sum()), part.nbytes),
        )
        need = problem.null_need[s, : t - s] + problem.tail_bytes(form)[t]
        forwards = problem.null_seconds[at - 1] - problem.null_seconds[s - 1]
        excess: Floats = np.where(need <= part.nbytes, forwards + right + left, np.inf)
        return excess

    def _split_steps(self, part: _Part, split: Split, at: int) -> list[_Part | Operation]:
        s, t = part.s, part.t
        return [
            Operation(Kind.F_CK, s),
            *(Operation(Kind.F_NULL, stage) for stage in range(s + 1, at)),
            _Part(split.right, at, t, part.nbytes - int(self.problem.output[at - 1])),
            _Part(split.left, s, at - 1 + split.overlap, part.nbytes),
        ]

    def _excess(self, form: Form, s: Any, t: Any, nbytes: Any) -> Floats:
        """Return the excess of subproblems at the bytes given: by slots, or as the floors say."""
        if form.head_dropped:  # the table counts a^(s-1), which is rounded up, within the memory
            output = self.problem.output[s - 1]
            slots = self.grid.down(nbytes + output) - self.output[s - 1]
        else:
            slots = self.grid.down(nbytes)
        floors, lengths = self.floors, t - s
        found: Floats = np.minimum(
            self.table.at(form, s, t, slots), floors.excess_by_start[form][s, lengths]
        )
        found[nbytes < floors.by_start[form][s, lengths]] = np.inf
        found[nbytes >= floors.whole[form][s, lengths]] = 0.0
        return found
