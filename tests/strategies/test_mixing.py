"""How much is computed again: the search climbs from the middle, and stops where it gets slower."""

from tflms.strategies import mixing


def climb(seconds):
    """Which parts are tried for given seconds a part, and which come out."""
    tried = []

    def make(part):
        tried.append(part)
        return None if seconds(part) is None else (part, seconds(part))

    found = mixing.variants(make, lambda variant: variant[1])
    return tried, min(found, key=lambda variant: variant[1], default=None)


def test_more_is_tried_as_long_as_it_is_quicker():
    tried, best = climb(lambda part: abs(part - 0.65))
    assert best[0] == 0.65
    assert tried == [0.5, 0.65, 0.8]


def test_less_is_tried_where_more_is_slower():
    tried, best = climb(lambda part: abs(part - 0.35))
    assert best[0] == 0.35
    assert tried == [0.5, 0.65, 0.35, 0.2]


def test_where_much_does_not_fit_less_may():
    tried, best = climb(lambda part: None if part > 0.3 else 1.0)
    assert best == (0.2, 1.0)
    assert tried == [0.5, 0.65, 0.35, 0.2]


def test_where_nothing_fits_there_is_no_variant():
    assert climb(lambda part: None) == ([0.5, 0.65, 0.35, 0.2], None)
