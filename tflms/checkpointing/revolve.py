"""Reversal of a chain with a fixed number of checkpoints, all stages taken as equal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tflms.checkpointing.chain import Chain
from tflms.checkpointing.operations import Kind, Operation
from tflms.checkpointing.patterns import reverse_from_start
from tflms.checkpointing.rivals import Listed
from tflms.checkpointing.schedule import Schedule
from tflms.errors import ConfigError


def revolve(
    chain: Chain, memory_limit: int | str | None = None, *, checkpoints: int | None = None
) -> Schedule:
    """Return the binomial reversal of the chain, optimal where all stages cost the same.

    The places of the checkpoints are chosen as if all stages were equal; every B comes right after
    its F_all. How many checkpoints fit is found by replaying on the true chain, so this rival is as
    strong as its idea allows.

    Source: Griewank and Walther, "Algorithm 799: revolve" (2000).

    Args:
        chain: what each stage costs.
        memory_limit: bytes; None: no limit.
        checkpoints: how many activations to keep at most beside the input; default: the number that
            gives the quickest schedule within the limit.

    Raises:
        InfeasibleError: none fits; ``minimum_bytes`` is the least that one of them needs.
        ConfigError: the number of checkpoints is negative or no whole number.
    """
    n = chain.stages
    if checkpoints is None:
        return Listed(chain, "revolve", all_revolve(n)).at(memory_limit)
    if isinstance(checkpoints, bool) or not isinstance(checkpoints, int) or checkpoints < 0:
        raise ConfigError(f"checkpoints is {checkpoints!r}; it must be a whole number, 0 or more")
    checkpoints = min(checkpoints, n)
    counts = _Counts(n)
    counts.reach(checkpoints)
    return Listed(chain, "revolve", [_reversal(n, counts, checkpoints)]).at(memory_limit)


class _Counts:
    """The least number of forwards that reverse l stages with c checkpoints beside the input.

    A forward that is followed by its backward at once is not counted. The counts obey
    t(l, c) = min over j of j + t(l - j, c - 1) + t(j, c), with t(l, 0) = l (l - 1) / 2.
    """

    def __init__(self, stages: int) -> None:
        lengths = np.arange(stages + 1)
        self.table: list[npt.NDArray[np.int64]] = [lengths * (lengths - 1) // 2]

    def reach(self, checkpoints: int) -> None:
        """Extend the table to a number of checkpoints."""
        while len(self.table) <= checkpoints:
            self.table.append(self._next(self.table[-1]))

    def split(self, length: int, checkpoints: int) -> int:
        """Return after how many stages to place the next checkpoint."""
        ways = self._ways(self.table[checkpoints - 1], self.table[checkpoints], length)
        return int(np.argmin(ways)) + 1

    @staticmethod
    def _ways(
        fewer: npt.NDArray[np.int64], same: npt.NDArray[np.int64], length: int
    ) -> npt.NDArray[np.int64]:
        ways: npt.NDArray[np.int64] = (
            np.arange(1, length) + fewer[length - 1 : 0 : -1] + same[1:length]
        )
        return ways

    def _next(self, fewer: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        counts = np.zeros_like(fewer)
        for length in range(2, len(fewer)):
            counts[length] = self._ways(fewer, counts, length).min()
        return counts


def all_revolve(stages: int) -> Iterator[list[Operation]]:
    """Yield the reversals with 0, 1, 2, .. checkpoints, up to where more change nothing."""
    counts = _Counts(stages)
    for checkpoints in range(stages):
        counts.reach(checkpoints)
        yield _reversal(stages, counts, checkpoints)
        if counts.table[checkpoints][stages] == stages - 1:
            return


def _reversal(stages: int, counts: _Counts, checkpoints: int) -> list[Operation]:
    operations: list[Operation] = []
    todo = [(1, stages, checkpoints)]
    while todo:
        s, t, free = todo.pop()
        if s == t or free == 0:
            operations.extend(reverse_from_start(s, t))
            continue
        at = s + counts.split(t - s + 1, free)
        operations.append(Operation(Kind.F_CK, s))
        operations.extend(Operation(Kind.F_NULL, stage) for stage in range(s + 1, at))
        todo += [(s, at - 1, free), (at, t, free - 1)]
    return operations
