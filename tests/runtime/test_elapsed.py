"""Time that passes is divided among what runs side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tflms.runtime.elapsed import Span, medians, shared


def test_what_runs_alone_takes_its_own_time():
    taken = shared([Span("a", 0, 10), Span("b", 10, 30), Span("c", 50, 55)])
    assert taken == {
        name: pytest.approx(ns * 1e-9) for name, ns in (("a", 10), ("b", 20), ("c", 5))
    }


def test_two_that_run_side_by_side_share_what_passes():
    taken = shared([Span("a", 0, 20), Span("b", 10, 20)])
    assert taken["a"] == pytest.approx(15e-9) and taken["b"] == pytest.approx(5e-9)


def test_an_operation_that_runs_twice_takes_both_times():
    assert shared([Span("a", 0, 5), Span("a", 7, 9)])["a"] == pytest.approx(7e-9)


SPANS = st.lists(
    st.builds(
        lambda name, begin, length: Span(name, begin, begin + length),
        st.sampled_from("abcd"), st.integers(0, 50), st.integers(0, 20),
    ),
    max_size=12,
)  # fmt: skip


@given(SPANS)
def test_all_together_take_the_time_in_which_something_ran(step):
    busy = {moment for span in step for moment in range(span.begin, span.end)}
    taken = shared(step)
    assert sum(taken.values()) == pytest.approx(len(busy) * 1e-9)
    assert set(taken) == {span.name for span in step}


def test_the_median_of_steps_counts_a_step_without_an_operation_as_none():
    assert medians([{"a": 3.0}, {"a": 1.0, "b": 2.0}, {"a": 2.0}]) == {"a": 2.0, "b": 0.0}
