"""The search of the paper's dials, on judges that are functions of the dials."""

from __future__ import annotations

from tflms.planning import tune


def test_the_fastest_dials_that_fit_are_found_with_the_fewest_values():
    def judge(dials):
        count = 50 if dials["n_tensors"] == -1 else min(dials["n_tensors"], 50)
        return 1000 - 10 * count + 5 * dials["lb"], 10.0 - 0.1 * dials["lb"] + 0.01 * count

    best, lowest = tune.search(judge, 600)
    assert lowest == 505
    assert best["lb"] == 20  # a longer lead is faster, and fits
    peak, _ = judge(best)
    assert peak <= 600 < judge({**best, "n_tensors": best["n_tensors"] - 1})[0]


def test_dials_that_make_no_difference_at_one_lead_are_not_tried_at_the_others():
    tried = []

    def judge(dials):
        tried.append(dials)
        return 100 - dials["lb"], 1.0

    assert tune.search(judge, 10) == (None, 80)
    assert sum(dials["swap_branches"] for dials in tried) == 4  # one lead, fused or not, twice


def test_branches_are_tried_at_every_lead_where_they_save():
    def judge(dials):
        return (50 if dials["swap_branches"] else 100) + dials["lb"], float(dials["lb"])

    best, lowest = tune.search(judge, 60)
    assert lowest == 51
    assert best["swap_branches"]
