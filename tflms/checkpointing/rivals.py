"""The strategies that optimal checkpointing is compared with, each as strong as its idea allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from tflms.checkpointing.chain import Chain
from tflms.checkpointing.operations import Operation, replay
from tflms.checkpointing.optimal import checked_limit, infeasible
from tflms.checkpointing.patterns import reverse_from_start, segmented
from tflms.checkpointing.schedule import Schedule
from tflms.errors import ConfigError

Candidates = Iterable[Sequence[Operation]]


def save_all(chain: Chain, memory_limit: int | str | None = None) -> Schedule:
    """Return the schedule that keeps everything, as training does without checkpointing.

    Raises:
        InfeasibleError: it does not fit; ``minimum_bytes`` is what it needs.
    """
    return Listed(chain, "save_all", [segmented(chain.stages, [1])]).at(memory_limit)


def recompute_all(chain: Chain, memory_limit: int | str | None = None) -> Schedule:
    """Return the schedule that keeps only the input and recomputes every stage from it.

    It runs O(n^2) forwards.

    Raises:
        InfeasibleError: it does not fit; ``minimum_bytes`` is what it needs.
    """
    candidates = [reverse_from_start(1, chain.stages)]
    return Listed(chain, "recompute_all", candidates).at(memory_limit)


def periodic(
    chain: Chain, memory_limit: int | str | None = None, *, segments: int | None = None
) -> Schedule:
    """Return the schedule that cuts the chain into segments of equal length.

    The forward keeps the inputs of all segments and everything of the last one, which also takes
    the remainder and the loss; the backward runs each other segment again, keeping everything.

    Source: PyTorch's ``checkpoint_sequential``, the main rival in Beaumont et al. (2019).

    Args:
        chain: what each stage costs.
        memory_limit: bytes; None: no limit.
        segments: 1 up to the number of stages without the loss; default: its square root.

    Raises:
        InfeasibleError: it does not fit; ``minimum_bytes`` is what it needs.
        ConfigError: the number of segments is out of range.
    """
    stages = _stages_without_loss(chain)
    if segments is None:
        segments = max(1, round(math.sqrt(stages)))
    if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= stages:
        raise ConfigError(f"segments is {segments!r}; it must be a whole number from 1 to {stages}")
    return Listed(chain, "periodic", [_equal_segments(chain, segments)]).at(memory_limit)


def best_periodic(chain: Chain, memory_limit: int | str | None = None) -> Schedule:
    """Return the quickest ``periodic`` schedule of all numbers of segments that fits.

    Raises:
        InfeasibleError: none fits; ``minimum_bytes`` is the least that one of them needs.
    """
    return Listed(chain, "best_periodic", all_periodic(chain)).at(memory_limit)


def all_periodic(chain: Chain) -> Candidates:
    """Yield the ``periodic`` schedules of all numbers of segments."""
    counts = range(1, _stages_without_loss(chain) + 1)
    return (_equal_segments(chain, segments) for segments in counts)


def sqrt_n(chain: Chain, memory_limit: int | str | None = None) -> Schedule:
    """Return the best schedule with segments of about equal saved bytes, none longer than a budget.

    A segment is closed as soon as what its F_all would keep exceeds the budget; budgets are
    searched, as the paper proposes, and one near the square root of the work is what usually wins.

    Source: Chen et al., "Training deep nets with sublinear memory cost" (2016), algorithm 3.

    Raises:
        InfeasibleError: none fits; ``minimum_bytes`` is the least that one of them needs.
    """
    return Listed(chain, "sqrt_n", all_sqrt_n(chain)).at(memory_limit)


class Listed:
    """The schedules that a strategy may choose of, each replayed once."""

    def __init__(self, chain: Chain, strategy: str, candidates: Candidates) -> None:
        """Take a chain, the strategy's name and its schedules."""
        self.chain, self.strategy = chain, strategy
        self._candidates: Candidates | None = candidates
        self._found: list[tuple[float, int, Sequence[Operation]]] = []

    def at(self, memory_limit: int | str | None) -> Schedule:
        """Return the quickest schedule that fits; of equals, the one with the least peak.

        Raises:
            InfeasibleError: none fits; ``minimum_bytes`` is the least that one of them needs.
        """
        limit = None if memory_limit is None else checked_limit(memory_limit)
        if self._candidates is not None:
            for operations in self._candidates:
                replayed = replay(self.chain, operations)
                self._found.append((replayed.makespan, replayed.peak_bytes, operations))
            self._candidates = None
        fitting = [one for one in self._found if limit is None or one[1] <= limit]
        if not fitting:
            assert limit is not None  # without a limit the first one fits
            raise infeasible(self.strategy, limit, min(peak for _, peak, _ in self._found))
        operations = min(fitting, key=lambda one: one[:2])[2]
        return Schedule.of(self.chain, operations, strategy=self.strategy, memory_limit=limit)


def _stages_without_loss(chain: Chain) -> int:
    return max(1, chain.stages - chain.ends_in_loss)


def _equal_segments(chain: Chain, segments: int) -> list[Operation]:
    length = _stages_without_loss(chain) // segments
    return segmented(chain.stages, [1 + length * segment for segment in range(segments)])


def all_sqrt_n(chain: Chain) -> Iterator[list[Operation]]:
    """Yield a schedule for each way in which a budget can cut the chain, few cuts first."""
    seen: set[tuple[int, ...]] = set()
    whole, most = sum(chain.saved_bytes), max(1, 2 * math.isqrt(chain.stages) + 2)
    for parts in range(1, 4 * most + 1):
        starts, held = [1], 0
        for stage, nbytes in enumerate(chain.saved_bytes, start=1):
            if held and held + nbytes > whole * 2 / (parts + 1) and stage > starts[-1]:
                starts.append(stage)
                held = 0
            held += nbytes
        if tuple(starts) not in seen:
            seen.add(tuple(starts))
            yield segmented(chain.stages, starts)
