"""The least memory in which each subproblem can be solved, exact to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tflms.checkpointing.grid import Grid
from tflms.checkpointing.problem import (
    NEVER,
    Floats,
    Form,
    Ints,
    Problem,
    Split,
    splits_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Floors:
    """For each form and stages s..t: the least bytes beside a^(s-1), and a time within them.

    Tables are indexed [s, t - s] (by start) and [t, t - s] (by end); a whole diagonal of
    subproblems and all its splits are then plain rectangles.

    Attributes:
        by_start: the least bytes, by form.
        by_end: the same with a^(s-1) counted.
        excess_by_start: seconds of forwards repeated by the quickest of the schedules that take
            the locally least memory; not the optimum, but feasible.
        excess_by_end: the same.
        whole: the least bytes in which every stage can be saved, so that no forward is repeated;
            by start.
    """

    by_start: dict[Form, Ints]
    by_end: dict[Form, Ints]
    excess_by_start: dict[Form, Floats]
    excess_by_end: dict[Form, Floats]
    whole: dict[Form, Ints]

    def least(self, form: Form, s: int, t: int) -> int:
        """Return the least bytes beside a^(s-1) for stages s..t."""
        return int(self.by_start[form][s, t - s])


def find_floors(problem: Problem, forms: tuple[Form, ...]) -> Floors:
    """Return the floors of all subproblems, one diagonal t - s at a time: O(n^3) in all."""
    n = problem.stages
    floors = Floors(
        {form: np.full((n + 2, n), NEVER, np.int64) for form in forms},
        {form: np.full((n + 2, n), NEVER, np.int64) for form in forms},
        {form: np.full((n + 2, n), np.inf) for form in forms},
        {form: np.full((n + 2, n), np.inf) for form in forms},
        {form: np.full((n + 2, n), NEVER, np.int64) for form in forms},
    )
    for length in range(n):
        s = np.arange(1, n - length + 1)
        t = s + length
        for form in forms:
            least, excess = _best_of_diagonal(problem, floors, form, forms, length)
            floors.by_start[form][s, length] = least
            floors.whole[form][s, length] = _whole_of_diagonal(problem, floors, form, length)
            floors.excess_by_start[form][s, length] = excess
            counted = np.minimum(least + problem.output[s - 1], NEVER)
            floors.by_end[form][t, length] = counted
            floors.excess_by_end[form][t, length] = excess
    return floors


def _best_of_diagonal(
    problem: Problem, floors: Floors, form: Form, forms: tuple[Form, ...], length: int
) -> tuple[Ints, Floats]:
    s = np.arange(1, problem.stages - length + 1)
    if length == 0:
        least = problem.leaf_need(form, s)
        return least, np.where(least < NEVER, 0.0, np.inf)
    least, excess = _by_saving(problem, floors, form, length)
    for split in splits_of(form, forms):
        need, right, left = split_needs(problem, floors, form, split, length)
        total = np.maximum(np.maximum(need, right), left)
        seconds = _split_excess(problem, floors, split, length)
        candidate = total.min(axis=1)
        quickest = np.where(total == candidate[:, None], seconds, np.inf).min(axis=1)
        tie = np.where(candidate == least, np.minimum(excess, quickest), excess)
        excess = np.where(candidate < least, quickest, tie)
        least = np.minimum(least, candidate)
    return least, excess


def _whole_of_diagonal(problem: Problem, floors: Floors, form: Form, length: int) -> Ints:
    s = np.arange(1, problem.stages - length + 1)
    if length == 0:
        least: Ints = problem.leaf_need(form, s)
        return least
    return _need_of_saving(problem, form, length, floors.whole)


def _need_of_saving(problem: Problem, form: Form, length: int, by_start: dict[Form, Ints]) -> Ints:
    """Return what saving stage s needs if the stages after it need what the tables say."""
    s = np.arange(1, problem.stages - length + 1)
    if not problem.saving:
        return np.full(len(s), NEVER)
    rest = by_start[Form(False, form.tail_saved)][s + 1, length - 1]
    shift = problem.saved[s] - (problem.output[s - 1] if form.head_dropped else 0)
    need = np.maximum(problem.save_need(form, s, s + length), shift + rest)
    least: Ints = np.minimum(need, NEVER)
    return least


def _by_saving(problem: Problem, floors: Floors, form: Form, length: int) -> tuple[Ints, Floats]:
    s = np.arange(1, problem.stages - length + 1)
    least = _need_of_saving(problem, form, length, floors.by_start)
    rest = floors.excess_by_start[Form(False, form.tail_saved)][s + 1, length - 1]
    return least, np.where(least < NEVER, rest, np.inf)


def split_needs(
    problem: Problem, floors: Floors, form: Form, split: Split, length: int
) -> tuple[Ints, Ints, Ints]:
    """Return the bytes that each split of each subproblem of a diagonal needs.

    Rows are s = 1..n - length, columns the splits s' = s + 1..s + length. The three arrays say what
    the forwards up to s' need, what the right part needs with a^(s'-1), and what the left part
    needs.
    """
    n = problem.stages
    first, last = slice(1, n - length + 1), slice(1 + length, n + 1)
    need = problem.null_need[first, :length] + problem.tail_bytes(form)[last, None]
    right = floors.by_end[split.right][last, :length][:, ::-1]
    left = floors.by_start[split.left][first, split.overlap : length + split.overlap]
    return need, right, left


def _split_excess(problem: Problem, floors: Floors, split: Split, length: int) -> Floats:
    n = problem.stages
    first, last = slice(1, n - length + 1), slice(1 + length, n + 1)
    right = floors.excess_by_end[split.right][last, :length][:, ::-1]
    left = floors.excess_by_start[split.left][first, split.overlap : length + split.overlap]
    s = np.arange(1, n - length + 1)[:, None]
    forwards = problem.null_seconds[s + np.arange(length)] - problem.null_seconds[s - 1]
    seconds: Floats = forwards + right + left
    return seconds


def binding_slots(
    problem: Problem, floors: Floors, grid: Grid, forms: tuple[Form, ...]
) -> dict[Form, Ints]:
    """Return up to which slot a need of F_ck or F_null forbids a split that else would fit.

    Entry [s, t - s] is 0 where no such need binds, which is the common case: then the parts of a
    split, infinite below their floors, forbid by themselves what the forwards forbid.
    """
    n = problem.stages
    binding = {form: np.zeros((n + 2, n), np.int64) for form in forms}
    for form, split in _each_split(forms):
        for length in range(1, n):
            need, right, left = split_needs(problem, floors, form, split, length)
            # The table rounds a^(s'-1) and the rest apart, so its right parts never start earlier;
            # a left part whose head is dropped may, as its memory grows by a^(s-1) rounded up.
            parts = np.maximum(grid.up(right), grid.up(left) - form.head_dropped)
            needed = grid.up(need)
            binds = np.where(needed > parts, needed, 0).max(axis=1)
            rows = binding[form][1 : n - length + 1, length]
            np.maximum(rows, binds, out=rows)
    return binding


def _each_split(forms: tuple[Form, ...]) -> Iterator[tuple[Form, Split]]:
    for form in forms:
        for split in splits_of(form, forms):
            yield form, split
