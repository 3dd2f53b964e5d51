"""Chains, the simulator that replays schedules, and the forms in which schedules are kept."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from tests.checkpointing.oracle import CASES, recorded_chain, recorded_schedule
from tflms.checkpointing import (
    Chain,
    Held,
    Item,
    Kind,
    Operation,
    Schedule,
    drop_inputs,
    optimal_schedule,
    periodic,
    replay,
    save_all,
)
from tflms.errors import ConfigError, InvariantError

CHAIN = Chain([1, 2, 3], [4, 5, 6], [10, 20, 30, 0], [25, 45, 2])
F_ALL, F_CK, F_NULL, F_DROP, B = Kind.F_ALL, Kind.F_CK, Kind.F_NULL, Kind.F_DROP, Kind.B


def operations(*pairs: tuple[Kind, int]) -> list[Operation]:
    return [Operation(*pair) for pair in pairs]


GOOD: dict[str, Any] = {
    "forward_seconds": [1, 2],
    "backward_seconds": [2, 4],
    "activation_bytes": [3, 3, 0],
    "saved_bytes": [5, 0],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_seconds": []}, "at least one stage"),
        ({"forward_seconds": [1, math.nan]}, r"forward_seconds\[1\] is nan"),
        ({"backward_seconds": [math.inf, 1]}, r"backward_seconds\[0\] is inf"),
        ({"backward_seconds": [1, -2]}, r"backward_seconds\[1\] is -2"),
        ({"backward_seconds": [1]}, "backward_seconds has 1 values"),
        ({"backward_seconds": [1, "fast"]}, "not a number"),
        ({"backward_seconds": 1.0}, "must be a sequence"),
        ({"backward_seconds": np.float64(1)}, "must be a sequence"),
        ({"activation_bytes": [3, 3]}, "activation_bytes has 2 values.*3 are expected"),
        ({"activation_bytes": [3, 3, -1]}, "cannot be negative"),
        ({"activation_bytes": [3, 3, 0.5]}, "whole numbers"),
        ({"saved_bytes": [5, math.nan]}, "finite"),
        ({"saved_bytes": [2, 0]}, "less than the 3 bytes of the output of stage 1"),
        ({"saved_bytes": "50"}, "must be a sequence"),
        ({"saved_bytes": [1 << 60, 0]}, "no size"),
        ({"gradient_bytes": [1, 1]}, "gradient_bytes has 2 values"),
        ({"forward_overhead_bytes": [1]}, "forward_overhead_bytes has 1 values"),
        ({"backward_overhead_bytes": [1, -1]}, "backward_overhead_bytes"),
        ({"forward_only_seconds": [1]}, "forward_only_seconds has 1 values"),
        ({"forward_only_overhead_bytes": [0, 0, 0]}, "forward_only_overhead_bytes has 3 values"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Chain(**{**GOOD, **change})


def test_a_chain_fills_in_what_is_not_given() -> None:
    chain = Chain(**GOOD, forward_overhead_bytes=[7, 0])
    assert chain.gradient_bytes == chain.activation_bytes
    assert chain.forward_only_seconds == chain.forward_seconds
    assert chain.forward_only_overhead_bytes == (7, 0)
    assert chain.backward_overhead_bytes == (0, 0)
    assert chain.stages == 2
    assert chain.ends_in_loss


def test_a_chain_takes_arrays_and_cannot_be_changed() -> None:
    chain = Chain(**{name: np.array(values) for name, values in GOOD.items()})
    assert chain == Chain(**GOOD)
    assert all(type(value) is int for value in chain.saved_bytes)
    assert hash(chain) == hash(Chain(**GOOD))
    with pytest.raises(dataclasses.FrozenInstanceError):
        chain.saved_bytes = (1, 1)  # type: ignore[misc]


def test_a_chain_survives_a_dictionary() -> None:
    assert Chain.from_dict(json.loads(json.dumps(CHAIN.to_dict()))) == CHAIN
    with pytest.raises(ConfigError, match="unknown: speed; missing: saved_bytes"):
        Chain.from_dict({**{k: v for k, v in GOOD.items() if k != "saved_bytes"}, "speed": [1]})


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_simulator_agrees_with_the_recorded_schedules(case: dict[str, Any]) -> None:
    chain = recorded_chain(case["chain"])
    if case["feasible"]:
        persistent = replay(chain, recorded_schedule(case["optimal_schedule"]))
        assert persistent.makespan == case["optimal_makespan"]
        assert persistent.peak_bytes == case["optimal_peak"]
        other = case["non_persistent"]
        free = replay(chain, recorded_schedule(other["schedule"]))
        assert free.makespan == other["optimal_makespan"]
        assert free.peak_bytes <= case["memory_limit"]


def test_bytes_are_counted_by_hand_through_one_schedule() -> None:
    run = replay(
        CHAIN,
        operations((F_CK, 1), (F_ALL, 2), (F_ALL, 3), (B, 3), (B, 2), (F_ALL, 1), (B, 1)),
    )
    assert [step.stored_bytes for step in run.steps] == [10, 30, 75, 77, 105, 30, 55]
    assert [step.peak_bytes for step in run.steps] == [30, 75, 77, 107, 125, 55, 65]
    assert run.peak_bytes == 125
    assert run.makespan == 1 + 2 + 3 + 6 + 5 + 1 + 4
    assert run.steps[4].released == (
        Item(Held.GRADIENT, 2),
        Item(Held.SAVED, 2),
        Item(Held.ACTIVATION, 1),
    )
    assert run.steps[2].source == Item(Held.SAVED, 2)


def test_a_dropped_input_leaves_memory_and_is_rebuilt() -> None:
    run = replay(
        CHAIN,
        operations(
            *((F_CK, 1), (F_DROP, 2), (F_ALL, 3), (B, 3)),
            *((F_CK, 1), (B, 2), (F_ALL, 1), (B, 1)),
        ),
    )
    assert run.steps[1].released == (Item(Held.ACTIVATION, 1),)
    assert run.steps[2].stored_bytes == 10 + 45
    assert run.makespan == 1 + 2 + 3 + 6 + 1 + 5 + 1 + 4


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(F_ALL, 2)], r"operation 0, F_all 2: neither a\^1 nor abar\^1"),
        ([(F_ALL, 4)], "stages 1 to 3"),
        ([(F_ALL, 1), (F_ALL, 1)], r"abar\^1 is in memory already"),
        ([(F_CK, 1), (F_CK, 1)], r"a\^1 is in memory already"),
        ([(F_ALL, 1), (B, 1)], r"the gradient in memory is d\^3, not d\^1"),
        ([(F_ALL, 1), (F_ALL, 2), (B, 3)], r"abar\^3 is not in memory"),
        ([(F_NULL, 1), (F_ALL, 1)], r"neither a\^0 nor abar\^0"),
        ([(F_ALL, 1), (F_DROP, 2)], "cannot be dropped"),
        ([(F_ALL, 1), (F_ALL, 2), (F_ALL, 3), (B, 3)], "2 stages left to back-propagate"),
        ([], "3 stages left"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(pairs: list[tuple[Kind, int]], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        replay(CHAIN, operations(*pairs))


def test_a_schedule_survives_json() -> None:
    schedule = drop_inputs(CHAIN, 125).dropping
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert schedule.replay().makespan == schedule.makespan


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"makespan_seconds": 1.0}, ConfigError, "claims makespan_seconds 1.0"),
        ({"peak_bytes": "much"}, ConfigError, "claims peak_bytes"),
        ({"format": "other"}, ConfigError, "format"),
        ({"operations": [["F_most", 1]]}, ConfigError, "one of F_all"),
        ({"operations": [["F_all", 1]]}, InvariantError, "left to back-propagate"),
        ({"chain": {}}, ConfigError, "missing: forward_seconds"),
        ({"memory_limit_bytes": 1}, InvariantError, "over the limit"),
    ],
)
def test_json_that_was_changed_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    data = json.loads(save_all(CHAIN, 1000).to_json())
    with pytest.raises(error, match=message):
        Schedule.from_json(json.dumps({**data, **change}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 3}'])
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Schedule.from_json(text)


def test_json_that_lacks_a_key_is_refused_by_its_name() -> None:
    data = json.loads(save_all(CHAIN).to_json())
    del data["operations"]
    with pytest.raises(ConfigError, match="lacks operations"):
        Schedule.from_json(json.dumps(data))


def test_a_diagram_shows_what_runs_and_what_is_held() -> None:
    lines = periodic(CHAIN, segments=2).diagram().splitlines()
    assert lines[:4] == [
        "     input ------",
        "   stage 1 c--- AB",
        "   stage 2  A==B",
        "   stage 3   AB",
    ]
    assert lines[4] == "    memory ▂▅▅▇█▄▄  peak 125 B"


def test_a_diagram_of_a_long_schedule_fits_in_its_width() -> None:
    n = 200
    chain = Chain([1] * n, [2] * n, [1] * (n + 1), [3] * n)
    drawing = optimal_schedule(chain, 60).diagram(width=80).splitlines()
    assert len(drawing) <= 70
    assert all(len(line) <= 80 + 20 for line in drawing[:-1])
    assert any("B" in line for line in drawing)


def test_a_schedule_says_what_it_costs() -> None:
    text = str(optimal_schedule(CHAIN, 125))
    assert "7 operations on 3 stages" in text
    assert "peak 125 B of limit 125 B" in text
