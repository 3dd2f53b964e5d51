"""The rival strategies against recorded results and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpointing.oracle import CASES, chains, recorded_chain
from tflms.checkpointing import (
    Chain,
    Kind,
    Schedule,
    best_periodic,
    minimum_memory,
    optimal_schedule,
    periodic,
    recompute_all,
    revolve,
    revolve_heterogeneous,
    save_all,
    sqrt_n,
)
from tflms.errors import ConfigError, InfeasibleError

RIVALS: list[Callable[..., Schedule]] = [
    save_all,
    recompute_all,
    periodic,
    best_periodic,
    sqrt_n,
    revolve,
    revolve_heterogeneous,
]


def uniform(stages: int, saved: int = 1) -> Chain:
    return Chain([1] * stages, [1] * stages, [1] * (stages + 1), [saved] * stages)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_simple_rivals_take_the_recorded_time_and_memory(case: dict[str, Any]) -> None:
    chain, recorded = recorded_chain(case["chain"]), case["baselines"]
    for name, strategy in (("save_all", save_all), ("recompute_all", recompute_all)):
        schedule = strategy(chain)
        assert schedule.makespan == recorded[name]["makespan"]
        assert schedule.peak_bytes == recorded[name]["peak"]
    for expected in recorded["periodic"]:
        schedule = periodic(chain, segments=expected["segments"])
        assert schedule.makespan == expected["makespan"]
        assert schedule.peak_bytes == expected["peak"]
    best = recorded["best_periodic_within_limit"]
    if best is None:
        with pytest.raises(InfeasibleError):
            best_periodic(chain, case["memory_limit"])
    else:
        assert best_periodic(chain, case["memory_limit"]).makespan == best


def fewest_forwards(stages: int, checkpoints: int) -> int:
    """Griewank and Walther's closed form: r l - beta(c + 1, r - 1), the base counted in c."""
    c, r = checkpoints + 1, 0
    while math.comb(c + r, c) < stages:
        r += 1
    return r * stages - (math.comb(c + r, c + 1) if r else 0)


@pytest.mark.parametrize("checkpoints", range(8))
def test_revolve_runs_as_many_forwards_as_the_binomial_formula_says(checkpoints: int) -> None:
    for stages in (1, 2, 3, 5, 8, 13, 21, 34, 55):
        schedule = revolve(uniform(stages), checkpoints=checkpoints)
        assert schedule.count(Kind.F_CK, Kind.F_NULL) == fewest_forwards(stages, checkpoints)
        assert schedule.count(Kind.F_ALL) == stages


def test_with_no_checkpoint_revolve_recomputes_everything() -> None:
    assert revolve(uniform(9), checkpoints=0).operations == recompute_all(uniform(9)).operations


@pytest.mark.parametrize("checkpoints", [0, 1, 2, 4, 7])
def test_revolve_stores_at_most_its_checkpoints(checkpoints: int) -> None:
    # Beside them: the input, the activation in hand, a saved set and two gradients.
    schedule = revolve(uniform(30), checkpoints=checkpoints)
    assert schedule.peak_bytes <= checkpoints + 5


def test_on_equal_stages_revolve_and_its_heterogeneous_form_agree() -> None:
    chain = uniform(24, saved=1)
    for limit in range(minimum_memory(chain), 30):
        assert revolve(chain, limit).makespan == revolve_heterogeneous(chain, limit).makespan


def test_segments_of_sqrt_n_are_balanced_in_bytes_not_in_stages() -> None:
    # One stage keeps as much as all the others together: it gets a segment of its own.
    chain = Chain([1] * 9, [1] * 9, [1] * 10, [1, 1, 1, 1, 40, 1, 1, 1, 1])
    budget = sqrt_n(chain, 50)
    assert budget.peak_bytes < periodic(chain, segments=3).peak_bytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chains(most_stages=7), st.integers(5, 90))
def test_no_rival_beats_the_optimum_or_breaks_the_limit(chain: Chain, limit: int) -> None:
    for rival in RIVALS:
        try:
            schedule = rival(chain, limit)
        except InfeasibleError as error:
            least = error.minimum_bytes
            assert least is None or (least > limit and rival(chain, least).peak_bytes <= least)
            continue
        assert schedule.peak_bytes <= limit
        assert optimal_schedule(chain, limit).makespan <= schedule.makespan


def test_rivals_without_a_limit_give_what_they_would_do_on_any_machine() -> None:
    chain = uniform(20, saved=3)
    assert save_all(chain).recomputed_seconds == 0
    assert recompute_all(chain).recomputed_seconds == 190
    assert periodic(chain).count(Kind.F_CK) == 3  # the default is the root of the stages: 4
    assert best_periodic(chain).makespan == save_all(chain).makespan


@pytest.mark.parametrize("segments", [0, 21, -1, 2.5, True])
def test_segments_out_of_range_are_refused(segments: Any) -> None:
    with pytest.raises(ConfigError, match="segments"):
        periodic(uniform(20), segments=segments)


@pytest.mark.parametrize("checkpoints", [-1, 1.5, True])
def test_checkpoints_out_of_range_are_refused(checkpoints: Any) -> None:
    with pytest.raises(ConfigError, match="checkpoints"):
        revolve(uniform(5), checkpoints=checkpoints)
