"""A refusal names a limit that is kept when it is asked for, and not far above what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import tflms
from tflms.strategies import auto
from tflms.strategies.least import least_limit
from tflms.zoo import graphs

BUILD = {
    "unet": lambda: graphs.unet3d(size=16, filters=4),
    "resnet18": lambda: graphs.resnet18(32, 2, width=4),
}


def plan(name, limit):
    case = BUILD[name]()
    config = {"memory_limit": limit, "min_swap_bytes": 0}
    return tflms.plan(case.graph, config, loss=case.loss, fetches=[case.loss, case.train_op])


@pytest.mark.parametrize("name", sorted(BUILD))
def test_what_a_refusal_names_is_kept(name):
    with pytest.raises(tflms.InfeasibleError) as caught:
        plan(name, 1000)
    named = caught.value.minimum_bytes
    assert named > caught.value.details["floor_bytes"]
    assert str(named) in str(caught.value)
    assert plan(name, named).predicted_peak_bytes <= named


def test_limits_are_tried_upwards_and_then_halved():
    asked = []

    def keeps(limit):
        asked.append(limit)
        return limit >= 1500

    assert 1500 <= least_limit(keeps, lambda: 1200, 1000, 1100, operations=10) <= 1550
    assert asked[:2] == [1100, 1200]
    assert len(asked) < 10
    few = []
    least_limit(lambda limit: not few.append(limit), lambda: 0, 1000, 2000, operations=10**6)
    assert few == [2000, 1500]  # planning for a large graph takes long


def test_nothing_is_named_where_nothing_is_kept():
    assert least_limit(lambda _: False, lambda: 0, 1000, 1100, operations=10) is None


def test_a_plan_for_a_smaller_limit_serves_where_none_is_found_for_the_limit_itself():
    asked = []

    def search(limit):
        def run():
            asked.append(limit)
            return "a plan" if limit <= kept else None

        return SimpleNamespace(limit=limit, order=range(10), run=run)

    prepared = SimpleNamespace(search=search, may_try=lambda limit: limit >= 950)
    kept = 1000
    assert auto._found(prepared, 1000)[1] == "a plan" and asked == [1000]
    kept, asked = 985, []
    found, plan = auto._found(prepared, 1000)
    assert (found.limit, plan, asked) == (980, "a plan", [1000, 980])
    kept, asked = 940, []
    assert auto._found(prepared, 1000)[1] is None
    assert asked == [1000, 980, 960]  # not below the floor
    assert auto._found(prepared, 900)[1] is None and len(asked) == 3
