"""The dynamic programme over (s, t, memory): the least repeated forwards of each subproblem.

An entry is an *excess*: the seconds of a subproblem beyond one F_all and one B of each of its
stages. It is what a schedule costs above keeping everything, it falls as memory grows, and the
durations of F_all and B drop out of the recurrence:

    E(s, t, m) = min( E(s+1, t, m - abar^s)                                   save stage s
                      min over s' of  F_null(s..s'-1) + E(s', t, m - a^(s'-1)) + E(s, s'-1, m) )

Source of the recurrence: Beaumont et al. (2019); here F_null is charged its own duration
and workspace, and F_all is tested against the gradient d^t that is in memory when it runs.

What makes it quick in numpy: all slots of one entry are a vector; the left parts of all splits of
(s, t) are consecutive rows of the table, and the right parts, shifted by the size of a^(s'-1) once
when they are found, are consecutive rows of a buffer that lives for one column t. A subproblem is
then one addition and one minimum over contiguous rows. Columns are worked on in blocks, so that the
rows of s are fetched from memory once a block. Slots that no schedule can reach are left out: when
stage s comes up, at most abar^1 .. abar^(s-1) are in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tflms.checkpointing.floors import Floors, binding_slots
from tflms.checkpointing.grid import Grid
from tflms.checkpointing.problem import Floats, Form, Ints, Problem, splits_of

_COLUMNS = 8  # columns in a block: 8 buffers of right parts fit in a shared cache
_ROWS = 128  # splits added at a time: the sums stay in a core's own cache
_LANES = 8  # slots are padded to whole vector registers of float64
_STEP = 64  # the first slot of a row is a multiple of this, so that it seldom changes


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The excess of every subproblem at every slot that can be reached.

    Attributes:
        flat: for each form, the rows of all subproblems by s, then by t, then by slot.
        starts: where the rows of each s begin in it (entry 0 is unused).
        first: the first slot of the rows of each s; below, nothing is reached or feasible.
        width: one more than the last slot of each row (beyond ``grid.slots`` is padding).
    """

    flat: dict[Form, Floats]
    starts: Ints
    first: Ints
    width: int

    @classmethod
    def empty(cls, problem: Problem, floors: Floors, grid: Grid, forms: tuple[Form, ...]) -> Table:
        """Return a table to be filled."""
        width = -(-(grid.slots + 1) // _LANES) * _LANES
        first = _first_slots(problem, floors, grid, forms)
        stages = np.arange(1, problem.stages + 1)
        sizes = (problem.stages - stages + 1) * (width - first[1:])
        starts = np.concatenate([[0, 0], np.cumsum(sizes)])
        flat = {form: _aligned(int(starts[-1])) for form in forms}
        return cls(flat, starts, first, width)

    def of_start(self, form: Form, s: int) -> Floats:
        """Return the rows of the subproblems that start with stage s, t = s, s + 1, .."""
        rows = self.flat[form][self.starts[s] : self.starts[s + 1]]
        return rows.reshape(-1, self.width - int(self.first[s]))

    def at(self, form: Form, s: Any, t: Any, slot: Any) -> Any:
        """Return the excess of one or more subproblems, each at a slot."""
        first = self.first[s]
        place = self.starts[s] + (t - s) * (self.width - first) + np.maximum(slot - first, 0)
        return np.where(slot >= first, self.flat[form][place], np.inf)


def fill_table(problem: Problem, floors: Floors, grid: Grid, forms: tuple[Form, ...]) -> Table:
    """Solve all subproblems of the given forms at all slots that can be reached."""
    n = problem.stages
    table = Table.empty(problem, floors, grid, forms)
    filler = _Filler(problem, floors, grid, forms, table)
    for first in range(1, n + 1, _COLUMNS):
        last = min(first + _COLUMNS, n + 1)
        for s in range(last - 1, 0, -1):
            filler.turn_to(s, last)
            for t in range(max(s, first), last):
                for form in forms:
                    filler.solve(form, s, t, t - first)
    return table


def _first_slots(problem: Problem, floors: Floors, grid: Grid, forms: tuple[Form, ...]) -> Ints:
    """Return for each s the first slot that can be reached and at which something is feasible.

    It never rises with s, so that the right parts of a split reach at least as far down as needed.
    """
    n = problem.stages
    reached = grid.first_reached(problem)
    feasible = np.min([grid.up(floors.by_start[form][: n + 1]).min(axis=1) for form in forms], 0)
    first = np.minimum.accumulate(np.maximum(reached, feasible)[1:])
    steps: Ints = np.concatenate([[0], first // _STEP * _STEP])
    return steps


def _aligned(size: int) -> Floats:
    """Return an array that begins on a vector register's border."""
    raw = np.empty(size + _LANES)
    skip = -(raw.ctypes.data // 8) % _LANES
    return raw[skip : skip + size]


class _Filler:
    """Solves one subproblem after another; knows the buffers of the current block of columns."""

    def __init__(
        self,
        problem: Problem,
        floors: Floors,
        grid: Grid,
        forms: tuple[Form, ...],
        table: Table,
    ) -> None:
        n, width = problem.stages, table.width
        s, t = np.mgrid[0 : n + 1, 0 : n + 1]
        self.problem, self.grid, self.width = problem, grid, width
        self.splits = {form: splits_of(form, forms) for form in forms}
        self.rows = {form: [table.of_start(form, a) for a in range(n + 1)] for form in forms}
        self.first: list[int] = table.first.tolist()
        self.output: list[int] = grid.stored(problem.output).tolist()
        self.saved: list[int] = grid.stored(problem.saved).tolist()
        self.forwards: list[float] = problem.null_seconds.tolist()
        binding = binding_slots(problem, floors, grid, forms)
        self.binding = {form: array.tolist() for form, array in binding.items()}
        self.save_need = {form: grid.up(problem.save_need(form, s, t)).tolist() for form in forms}
        self.whole = {form: grid.up(floors.whole[form]).tolist() for form in forms}
        self.floor = {form: grid.up(floors.by_start[form]).tolist() for form in forms}
        self.floor_excess = {form: floors.excess_by_start[form].tolist() for form in forms}
        # The right parts of the columns of the block; a second buffer to move them to when the
        # first slot changes.
        self.right_memory = {form: np.empty((_COLUMNS, (n + 2) * width)) for form in forms}
        self.spare_memory = np.empty((n + 2) * width)
        self.right: dict[Form, list[Floats]] = {}
        self.sums_memory = _aligned((_ROWS + 1) * width)
        self.now = -1  # the first slot of the rows being solved
        self.sums, self.scratch = self.sums_memory, self.sums_memory

    def turn_to(self, s: int, last: int) -> None:
        """Prepare the buffers for the rows of s; ``last`` is the end of the block of columns."""
        if s < last - 1 and self.first[s] == self.now:
            return
        drop, length = self.first[s] - self.now, self.width - self.first[s]
        for form, columns in self.right_memory.items():
            views = []
            for column, memory in enumerate(columns):
                view = memory[: len(memory) // length * length].reshape(-1, length)
                if s < last - 1:  # rows s + 1 .. of this block are in use
                    spare = self.spare_memory[: (last - s) * length].reshape(-1, length)
                    spare[:] = self.right[form][column][s + 1 : last + 1, drop:]
                    view[s + 1 : last + 1] = spare
                views.append(view)
            self.right[form] = views
        self.now = self.first[s]
        self.sums = self.sums_memory[: (_ROWS + 1) * length].reshape(-1, length)
        self.scratch = np.empty(length)

    def solve(self, form: Form, s: int, t: int, column: int) -> None:
        """Solve stages s..t in one form; ``column`` is t's place in its block."""
        best, forwards = self.rows[form][s][t - s], self.forwards[s - 1]
        whole = max(self.whole[form][s][t - s] - self.now, 0)
        if s < t and whole > 0:
            self._save(form, s, t)
            binding = self.binding[form][s][t - s] - self.now
            for split in self.splits[form]:
                right = self.right[split.right][column][s + 1 : t + 1]
                left = self.rows[split.left][s][split.overlap : t - s + split.overlap]
                if split.overlap and form.tail_saved:  # stage t is saved: it cannot be s'
                    right, left = right[:-1], left[:-1]
                for start in range(0, len(left), _ROWS):
                    sums = self._add(left[start : start + _ROWS], right[start : start + _ROWS])
                    if binding > 0:
                        self._forbid(form, s, t, start, sums, binding)
                    self._keep_least(len(sums))
            np.subtract(self.sums[0], forwards, out=best)
            if not self.grid.exact:
                self._floor(form, s, t, best)
        else:
            best[:whole] = np.inf
        best[whole:] = 0.0
        if s > 1:
            target = self.right[form][column][s]
            shift = min(self.output[s - 1], len(target))
            target[:shift] = np.inf
            np.add(best[: len(best) - shift], forwards, out=target[shift:])

    def _save(self, form: Form, s: int, t: int) -> None:
        """Start the sums with the excess of saving stage s."""
        best, forwards, now = self.sums[0], self.forwards[s - 1], self.now
        below, width = self.first[s + 1], self.width
        shift = self.saved[s]
        end = width
        if form.head_dropped:
            shift -= self.output[s - 1]
            if shift < 0:  # memory grows; beyond the last slot there is nothing that is ever used
                end = width + shift
        start = max(self.save_need[form][s][t], shift + below, now)
        if start >= end or not self.problem.saving:
            best[:] = np.inf
            return
        rest = self.rows[Form(False, form.tail_saved)][s + 1][t - s - 1]
        offset = shift + below
        best[: start - now] = np.inf
        np.add(rest[start - offset : end - offset], forwards, out=best[start - now : end - now])
        if end < width:
            best[end - now :] = rest[-1] + forwards

    def _add(self, left: Floats, right: Floats) -> Floats:
        """Return the sums of the left and right parts of splits, with what they compete against."""
        sums = self.sums[: len(left) + 1]
        np.add(left, right, out=sums[1:])
        return sums

    def _keep_least(self, rows: int) -> None:
        """Put the least of the sums in their first row."""
        np.minimum.reduce(self.sums[:rows], axis=0, out=self.scratch)
        self.sums[0] = self.scratch

    def _forbid(self, form: Form, s: int, t: int, start: int, sums: Floats, upto: int) -> None:
        """Rule out the splits whose F_ck and F_null do not fit, at the slots where that matters."""
        tail = self.problem.tail_bytes(form)[t]
        need = self.grid.up(self.problem.null_need[s, start : start + len(sums) - 1] + tail)
        # Below the floor nothing fits at all, and above it few splits are concerned: the need
        # grows with s'. Where memory grows by a rounded size, a slot below the floor may do.
        floor = max(self.floor[form][s][t - s] - form.head_dropped - self.now, 0)
        sums[1:, :floor] = np.inf
        row = int(np.searchsorted(need, self.now + floor, side="right"))
        concerned = sums[1 + row :, floor:upto]
        slots = np.arange(self.now + floor, self.now + floor + concerned.shape[1])
        np.copyto(concerned, np.inf, where=slots < need[row:, None])

    def _floor(self, form: Form, s: int, t: int, best: Floats) -> None:
        """Allow what is feasible to the byte, though rounding says otherwise."""
        slot = max(self.floor[form][s][t - s] - self.now, 0)
        if slot < len(best) and best[slot] == np.inf:
            tail = best[slot:]
            np.minimum(tail, self.floor_excess[form][s][t - s], out=tail)
