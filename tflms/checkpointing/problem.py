"""The subproblems of the dynamic programme: their forms and what they need.

A subproblem works on stages s..t with a^(s-1) in memory, not counted, and d^t in memory, counted.
It comes in four forms, told by two flags. The original programme knows only ``PLAIN``; the others
serve ``drop_inputs``, where the input of a saved stage may leave memory early:

* ``head_dropped``: a^(s-1) is to be dropped by the F_all of stage s, and the work ends with d^s and
  abar^s in memory, one backward short of d^(s-1);
* ``tail_saved``: the F_all of stage t was run before; abar^t is in memory, counted, and waits for
  its input a^(t-1) to be rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tflms.checkpointing.chain import Chain

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER = 1 << 60
"""Bytes that no machine has: the need of a subproblem that cannot be solved at any limit."""


class Form(NamedTuple):
    """Which of the four forms a subproblem has."""

    head_dropped: bool
    tail_saved: bool


PLAIN = Form(False, False)
TAIL = Form(False, True)
HEAD = Form(True, False)
BOTH = Form(True, True)

ORIGINAL = (PLAIN,)
"""The form of the published programme."""

DROPPING = (TAIL, BOTH, PLAIN, HEAD)
"""All forms, in the order in which those of the same stages s..t need each other."""


@dataclass(frozen=True, slots=True)
class Split:
    """One way to split a subproblem at s': solve s'..t from a^(s'-1), then s..s'-1 or s..s'.

    Attributes:
        right: the form of the part that starts at s'.
        left: the form of the part that starts at s again.
        overlap: 1 where the left part ends with stage s' itself (its input was dropped), else 0.
    """

    right: Form
    left: Form
    overlap: int


def splits_of(form: Form, forms: tuple[Form, ...]) -> tuple[Split, ...]:
    """Return the ways to split a subproblem of a form, given the forms that are solved at all."""
    head, tail = form
    keep = Split(Form(False, tail), Form(head, False), 0)
    if TAIL not in forms:
        return (keep,)
    return keep, Split(Form(True, tail), Form(head, True), 1)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A chain as arrays indexed by stage (entry 0 of per-stage arrays is unused).

    Attributes:
        stages: n.
        output, saved, gradient: bytes of a^l, abar^l, d^l.
        all_need: bytes of abar^l and the workspace of F_all.
        back_need: bytes that B^l needs beside its input: d^l, abar^l, d^(l-1) and its workspace.
        null_seconds: running sum of the durations of F_null up to and with stage l.
        null_need: entry [s, k - 1] is what F_ck^s and F_null^(s+1..s+k-1) need beside a^(s-1).
        saving: whether a stage may be saved before the rest of the subproblem is solved.
    """

    stages: int
    output: Ints
    saved: Ints
    gradient: Ints
    all_need: Ints
    back_need: Ints
    null_seconds: Floats
    null_need: Ints
    saving: bool = True

    @classmethod
    def of(cls, chain: Chain, *, saving: bool = True) -> Problem:
        """Return the problem of a chain."""
        n = chain.stages
        output = np.array(chain.activation_bytes, np.int64)
        gradient = np.array(chain.gradient_bytes, np.int64)
        saved = np.array((0, *chain.saved_bytes), np.int64)
        null = np.array((0, *chain.forward_only_overhead_bytes), np.int64) + output
        pair = null.copy()
        pair[1:] += output[:-1]
        null_need = np.zeros((n + 1, n), np.int64)
        for s in range(1, n + 1):
            null_need[s, 0] = null[s]
            null_need[s, 1 : n - s + 1] = pair[s + 1 :]
        back_need = gradient + saved + np.array((0, *chain.backward_overhead_bytes), np.int64)
        back_need[1:] += gradient[:-1]
        return cls(
            stages=n,
            output=output,
            saved=saved,
            gradient=gradient,
            all_need=saved + np.array((0, *chain.forward_overhead_bytes), np.int64),
            back_need=back_need,
            null_seconds=np.cumsum(np.array((0.0, *chain.forward_only_seconds))),
            null_need=np.maximum.accumulate(null_need, axis=1),
            saving=saving,
        )

    def sizes(self) -> Ints:
        """Return all sizes but that of the chain's input, which is held throughout."""
        return np.concatenate(
            [
                self.output[1:],
                self.saved,
                self.gradient,
                self.all_need,
                self.back_need,
                self.null_need[:, 0],
            ]
        )

    def tail_bytes(self, form: Form) -> Ints:
        """Return, for each t, what is held at the tail from the start: d^t, or d^t and abar^t."""
        return self.gradient + self.saved if form.tail_saved else self.gradient

    def save_need(self, form: Form, s: Any, t: Any) -> Any:
        """Return what saving stage s < t needs beside a^(s-1): for its F_all, then for its B."""
        forward = self.tail_bytes(form)[t] + self.all_need[s]
        return forward if form.head_dropped else np.maximum(forward, self.back_need[s])

    def leaf_need(self, form: Form, s: Any) -> Any:
        """Return what the single stage s needs beside a^(s-1)."""
        if form == BOTH:
            return self.all_need[s] * 0 + NEVER
        if form == TAIL:
            return self.back_need[s]
        forward = self.gradient[s] + self.all_need[s]
        return forward if form == HEAD else np.maximum(forward, self.back_need[s])

    def save_shift(self, form: Form, s: int) -> int:
        """Return by how many bytes saving stage s shrinks the memory for the stages after it."""
        return int(self.saved[s] - (self.output[s - 1] if form.head_dropped else 0))
