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
    return quickest(chain, memory_limit, "save_all", [segmented(chain.stages, [1])])


def recompute_all(chain: Chain, memory_limit: int | str | None = None) -> Schedule:
    """Return the schedule that keeps only the input and recomputes every stage from it.

    It runs O(n^2) forwards.

    Raises:
        InfeasibleError: it does not fit; ``minimum_bytes`` is what it needs.
    """
    return quickest(chain, memory_limit, "recompute_all", [reverse_from_start(1, chain.stages)])


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
    return quickest(chain, memory_limit, "periodic", [_equal_segments(chain, segments)])


def best_periodic(chain: Chain, memory_limit: int | str | None = None) -> Schedule:
    """Return the quickest ``periodic`` schedule of all numbers of segments that fits.

    Raises:
        InfeasibleError: none fits; ``minimum_bytes`` is the least that one of them needs.
    """
    counts = range(1, _stages_without_loss(chain) + 1)
    candidates = (_equal_segments(chain, segments) for segments in counts)
    return quickest(chain, memory_limit, "best_periodic", candidates)


def sqrt_n(chain: Chain, memory_limit: int | str | None = None) -> Schedule:
    """Return the best schedule with segments of about equal saved bytes, none longer than a budget.

    A segment is closed as soon as what its F_all would keep exceeds the budget; budgets are
    searched, as the paper proposes, and one near the square root of the work is what usually wins.

    Source: Chen et al., "Training deep nets with sublinear memory cost" (2016), algorithm 3.

    Raises:
        InfeasibleError: none fits; ``minimum_bytes`` is the least that one of them needs.
    """
    return quickest(chain, memory_limit, "sqrt_n", _segments_by_budget(chain))


def quickest(
    chain: Chain, memory_limit: int | str | None, strategy: str, candidates: Candidates
) -> Schedule:
    """Return the quickest of the candidates that fits; of equals, the one with the least peak.

    Raises:
        InfeasibleError: none fits; ``minimum_bytes`` is the least that one of them needs.
    """
    limit = None if memory_limit is None else checked_limit(memory_limit)
    best: tuple[float, int] | None = None
    chosen: Sequence[Operation] = ()
    least = None
    for operations in candidates:
        replayed = replay(chain, operations)
        least = replayed.peak_bytes if least is None else min(least, replayed.peak_bytes)
        cost = (replayed.makespan, replayed.peak_bytes)
        if (limit is None or replayed.peak_bytes <= limit) and (best is None or cost < best):
            best, chosen = cost, operations
    if best is None:
        assert limit is not None and least is not None  # without a limit the first one fits
        raise infeasible(strategy, limit, least)
    return Schedule.of(chain, chosen, strategy=strategy, memory_limit=limit)


def _stages_without_loss(chain: Chain) -> int:
    return max(1, chain.stages - chain.ends_in_loss)


def _equal_segments(chain: Chain, segments: int) -> list[Operation]:
    length = _stages_without_loss(chain) // segments
    return segmented(chain.stages, [1 + length * segment for segment in range(segments)])


def _segments_by_budget(chain: Chain) -> Iterator[list[Operation]]:
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
