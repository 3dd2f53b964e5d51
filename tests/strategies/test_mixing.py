"""How much is computed again: the search climbs from the middle, and stops where it gets slower."""

from itertools import pairwise

import pytest

from tflms.strategies import mixing


def climb(seconds):
    """Which parts are tried for given seconds a part, and the quickest that comes out."""
    tried = []

    def make(part):
        tried.append(part)
        return None if seconds(part) is None else (part, seconds(part))

    found = mixing.variants(make, lambda variant: variant[1])
    return tried, min(found, key=lambda variant: variant[1], default=None)


@pytest.mark.parametrize("best", [0.2, 0.3, 0.5, 0.65, 0.8])
def test_the_quickest_of_all_is_found_on_the_way_up_or_down(best):
    tried, found = climb(lambda part: abs(part - best))
    assert found[0] == best
    assert len(tried) == len(set(tried))


def test_more_is_tried_first_and_less_only_where_more_is_slower():
    assert all(a < b for a, b in pairwise(climb(lambda part: abs(part - 0.65))[0]))
    down, _ = climb(lambda part: part)
    assert down[1] > down[0] > down[2] > down[3]


def test_where_much_does_not_fit_less_may():
    assert climb(lambda part: None if part > 0.3 else 1.0)[1] == (0.3, 1.0)


def test_where_nothing_fits_there_is_no_variant():
    assert climb(lambda part: None)[1] is None
