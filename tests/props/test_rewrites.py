"""Random steps and dials: the rewritten graph erases to the old one and runs as the old one did."""

from __future__ import annotations

import networkx as nx
from hypothesis import HealthCheck, event, given, settings

from tests.props.oracle import Text
from tests.props.steps import dials, step, steps
from tests.strategies.step import rewrite
from tflms.errors import GraphError
from tflms.graph import text

TARGETS = ("train", "loss", "aside")
MANY = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def rewritten(source, config):
    """The step before and after, or None where the last layer alone has a gradient to read."""
    try:
        outcome = rewrite(source, targets=TARGETS, **config)
    except GraphError:
        event("no gradients")
        return None
    event(f"{len(outcome.swapped) > 0} swapped")
    return outcome, Text(source), Text(outcome.after)


@MANY
@given(steps(), dials())
def test_a_rewritten_step_erases_to_the_old_one(source, config):
    found = rewritten(source, config)
    if found is None:
        return
    _, before, after = found
    assert [name for name in after.type if name not in after.role] == list(before.type)
    for name in before.type:
        assert [after.root(v) for v in after.inputs[name]] == before.inputs[name]
        assert after.controls[name][: len(before.controls[name])] == before.controls[name]
    for name, origin in after.origin.items():
        assert after.type[name] == before.type[origin]
        assert [after.root(v) for v in after.inputs[name]] == before.inputs[origin]


@MANY
@given(steps(), dials())
def test_a_rewritten_step_has_no_cycle_and_means_the_same(source, config):
    found = rewritten(source, config)
    if found is None:
        return
    _, before, after = found
    assert nx.is_directed_acyclic_graph(after.digraph())
    old, new = before.meaning(), after.meaning()
    assert {name: new[name] for name in old} == old


@MANY
@given(steps(), dials())
def test_the_same_operations_are_alive_in_every_branch(source, config):
    found = rewritten(source, config)
    if found is None:
        return
    _, before, after = found
    for taken in (False, True):
        old, new = before.alive(taken), after.alive(taken)
        assert {name: new[name] for name in old} == old


@MANY
@given(steps(), dials())
def test_whatever_is_fetched_runs_what_it_ran_before(source, config):
    found = rewritten(source, config)
    if found is None:
        return
    _, before, after = found
    for targets in (["loss"], ["aside"], ["train"], ["loss", "aside"]):
        old, new = before.runs(targets), after.runs(targets)
        assert {name for name in new if name not in after.role} <= old
        # A shape operation that was taken early is read by nobody, unless somebody waits for it.
        assert {before.type[name] for name in old - new} <= {"Shape"}
        if "train" not in targets and not config["swap_branches"]:
            # The forward phase waits for what leaves; nothing comes back.
            assert {after.role[name] for name in new - old} <= {"clone", "identity", "swap_out"}


@MANY
@given(steps(), dials())
def test_every_anchor_keeps_its_distance_on_the_way_to_the_use(source, config):
    found = rewritten(source, config)
    if found is None:
        return
    outcome, before, _ = found
    view, level = before.digraph(), before.levels(TARGETS)
    graph = outcome.graph
    for one in outcome.swapped:
        for swap_in, uses in one.groups:
            (anchor,) = (graph.op(c).name for c in graph.op(swap_in).controls)
            names = [graph.op(use.op).name for use in uses]
            assert all(nx.has_path(view, anchor, name) for name in names)
            nearest = min(level[name] - level[anchor] for name in names)
            assert config["lb"] <= nearest <= config["ub"]


@MANY
@given(steps(), dials())
def test_a_swapped_value_is_on_the_host_between_its_uses(source, config):
    found = rewritten(source, config)
    if found is None:
        return
    outcome, before, after = found
    level, alive = before.levels(TARGETS), before.read_by_an_effect(TARGETS) - before.shapes()
    assert config["n_tensors"] < 0 or len(outcome.swapped) <= config["n_tensors"]
    for one in outcome.swapped:
        name = outcome.graph.value_name(one.value)
        readers = [op for op in after.type if name in after.inputs[op]]
        stay = [level[op] for op in readers if op not in after.role and op in level and op in alive]
        outs = [op for op in readers if after.role.get(op) == "swap_out"]
        assert len(outs) == 1
        ins = [op for op in after.type if after.inputs[op] == outs]
        assert ins
        for op in ins:
            assert after.role[op] == "swap_in"
            (anchor,) = after.controls[op]
            assert max(stay, default=level[before.maker(name)]) < level[anchor]


@MANY
@given(steps(), dials())
def test_the_text_of_a_rewritten_step_is_read_back(source, config):
    found = rewritten(source, config)
    if found is None:
        return
    outcome, _, after = found
    assert text.dump(text.parse(outcome.after)) == outcome.after
    assert rewrite(source, targets=TARGETS, **config).after == outcome.after
    assert len(after.type) == len(outcome.graph)


@MANY
@given(steps(), dials())
def test_a_rewrite_is_taken_back_in_full(source, config):
    found = rewritten(source, config)
    if found is None:
        return
    outcome, _, _ = found
    outcome.graph.rollback(0)
    assert outcome.after == outcome.before


def test_most_steps_of_some_size_hold_something_to_swap():
    counts = [len(rewrite(step(seed, 20), targets=TARGETS, lb=1).swapped) for seed in range(40)]
    assert sum(count > 0 for count in counts) >= 30
    assert sum(counts) >= 120
