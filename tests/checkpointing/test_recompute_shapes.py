"""Steps that no single value cuts: several values a boundary, long skips, branches, two losses."""

from __future__ import annotations

import networkx as nx
import pytest

from tests.checkpointing import shapes
from tests.props.oracle import Text
from tests.strategies.step import chain as tanh_chain
from tflms.checkpointing import strategy
from tflms.checkpointing.execute import recomputed_in
from tflms.checkpointing.stages import cut, cuts
from tflms.checkpointing.weigh import weigh
from tflms.config import WITHOUT_LIMIT, Config
from tflms.errors import GraphError, InfeasibleError
from tflms.graph import erase, order, text
from tflms.graph.verify import verify
from tflms.planning import cost, simulate

NBYTES = 64 * 8 * 4


def read(source, targets=("train",)):
    graph = text.parse(source)
    ops = [text.op_named(graph, name) for name in targets]
    return graph, order.phases(graph, loss=text.value_named(graph, "loss"), targets=ops)


def names(graph, values):
    return [graph.value_name(v) for v in values]


def rewritten(source, name, limit=None, targets=("train",)):
    graph, phases = read(source, targets)
    edges, weights = erase.edges(graph), cost.sizes(graph)
    step = {op.id for op in graph.ops() if phases.step[op.id]}
    plain = simulate.simulate(graph, weights, step).peak_bytes
    given = None if limit is None else int(limit * plain)
    config = Config(strategy=name, memory_limit=given)
    done = strategy.run(graph, phases, config, cost.static_costs(graph, weights), given)
    verify(graph)
    erase.check(graph, edges)
    return graph, done, plain


def same(source, graph, targets=("train",)):
    """The step means what it meant, has no cycle, and no run asks for more than it did."""
    before, after = Text(source), Text(text.dump(graph))
    assert nx.is_directed_acyclic_graph(after.digraph())
    old, new = before.meaning(), after.meaning()
    assert {op: new[op] for op in old} == old
    for target in ("loss", *targets):
        assert after.runs([target]) & set(before.type) <= before.runs([target])
    return after


def inserted(after, target):
    return {op for op in after.runs([target]) if "--tflms" in op}


# how they are cut ---------------------------------------------------------------------------------


def test_a_long_skip_is_kept_and_what_lies_under_it_becomes_a_chain():
    graph, phases = read(shapes.long_skip(12))
    coarse, fine = cuts(graph, phases)
    assert coarse.stages == 2 and not coarse.kept  # all that the skip spans is one stage
    assert names(graph, sorted(fine.kept)) == ["h1"]
    assert fine.stages > 9
    assert all(len(values) == 1 for values in fine.outputs[1:])


def test_what_is_kept_counts_in_no_stage_and_its_gradient_in_all_that_it_spans():
    graph, phases = read(shapes.long_skip(12))
    weights = cost.sizes(graph)
    found = cut(graph, phases)
    chain = weigh(found, weights, cost.static_costs(graph, weights))
    assert chain.activation_bytes[1] == 0  # a^1 is h1, which is there anyway
    assert max(chain.activation_bytes[2:]) == NBYTES
    spanned = chain.gradient_bytes[3 : found.stages - 2]
    assert set(spanned) == {2 * NBYTES}  # of the layer, and of the skip


def test_two_states_are_handed_on_together():
    graph, phases = read(shapes.two_states(10))
    found = cut(graph, phases)
    handed = [set(names(graph, values)) for values in found.outputs]
    assert {"h4", "c4"} in handed or {"h5", "c5"} in handed
    assert sum(len(values) == 2 for values in handed) >= 5
    assert not found.kept
    for values in found.outputs:  # who reads them late belongs to one of the two stages beside
        for value in values:
            made = found.stage[graph.value(value).op]
            assert {stage for *_, stage in found.late_uses(value)} <= {made, made + 1}


def test_branches_are_run_one_behind_the_other_and_so_are_their_gradients():
    graph, phases = read(shapes.two_branches(5))
    found = cut(graph, phases)
    assert found.stages >= 12
    row = [graph.op(op).name for op in found.spine.ops]
    place = {name: i for i, name in enumerate(row)}
    branches = [[place[f"da{d}{b}"] for d in ("d4", "d3", "d2", "d1", "d0")] for b in "tf"]
    assert all(branch == sorted(branch) for branch in branches)
    assert max(branches[1]) < min(branches[0]) or max(branches[0]) < min(branches[1])
    assert place["dag4"] > max(branches[1])


# what is rewritten --------------------------------------------------------------------------------

SOURCES = {
    "long skip": shapes.long_skip(16),
    "two states": shapes.two_states(12),
    "two branches": shapes.two_branches(6),
}
ASKED = ("optimal_checkpointing", "recompute_all", "periodic", "best_periodic")


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("kind", SOURCES)
def test_rewritten_steps_mean_the_same_and_keep_the_limit(kind, name):
    limit = None if name in WITHOUT_LIMIT else 0.8
    graph, done, plain = rewritten(SOURCES[kind], name, limit)
    same(SOURCES[kind], graph)
    assert recomputed_in(graph)
    assert done.timeline.peak_bytes <= (limit or 0.97) * plain


def test_less_is_needed_than_where_only_single_values_cut():
    source = SOURCES["long skip"]
    graph, phases = read(source)
    coarse = cuts(graph, phases)[0]
    weights = cost.sizes(graph)
    chain = weigh(coarse, weights, cost.static_costs(graph, weights))
    assert chain.saved_bytes[1] > 14 * NBYTES  # one stage keeps nearly all
    _, done, plain = rewritten(source, "optimal_checkpointing", 0.7)
    assert done.timeline.peak_bytes < plain - 5 * NBYTES
    assert any("kept across stages" in note and "h1" in note for note in done.told())


def test_what_is_kept_runs_once():
    graph, _, _ = rewritten(SOURCES["long skip"], "recompute_all")
    again = {graph.op(r.op).name for r in recomputed_in(graph)}
    assert "h1" not in again and {"h3", "h4", "h5"} <= again


def test_what_only_kept_values_make_waits_for_the_stage_before():
    """Else the same operation of all stages that run again would run at once."""
    source = SOURCES["two states"].replace(
        "a5 = MatMul(h4, r5)", "k5 = Exp(h0) : f32[64,8]\na5 = MatMul(k5, r5)"
    )
    graph, _, _ = rewritten(source, "recompute_all")
    same(source, graph)
    seeds = [op for op in graph.ops() if op.role == "seed" and len(op.controls) > 1]
    waited = [graph.op(c) for op in seeds for c in op.controls]
    assert any(
        op.role == "identity" and graph.producer(op.inputs[0]).role == "clone" for op in waited
    )


def test_a_run_of_one_of_two_train_operations_runs_nothing_for_the_other():
    source, targets = shapes.two_branches(6, apart=True), ("train", "train_g")
    graph, _, _ = rewritten(source, "recompute_all", targets=targets)
    after = same(source, graph, targets)
    assert inserted(after, "train") or inserted(after, "train_g")
    assert not inserted(after, "loss")


# what is refused ----------------------------------------------------------------------------------


def test_gradients_that_nothing_can_wait_for_are_named():
    graph, phases = read(shapes.unwaitable(6))
    with pytest.raises(GraphError, match=r"no gradient .* to wait for .*'dw'.*auto"):
        cut(graph, phases)


def test_a_limit_below_what_one_operation_needs_is_refused_with_that_operation():
    with pytest.raises(InfeasibleError, match="alone needs") as caught:
        rewritten(SOURCES["two states"], "optimal_checkpointing", 0.05)
    assert caught.value.details["op"] and caught.value.minimum_bytes


def test_a_limit_between_is_refused_with_what_is_held_then():
    with pytest.raises(InfeasibleError, match=r"Most is held when .* runs: ") as caught:
        rewritten(SOURCES["long skip"], "optimal_checkpointing", 0.3)
    enough = caught.value.minimum_bytes
    graph, phases = read(SOURCES["long skip"])
    costs = cost.static_costs(graph, cost.sizes(graph))
    config = Config(strategy="optimal_checkpointing", memory_limit=enough)
    done = strategy.run(graph, phases, config, costs, enough)
    assert done.timeline.peak_bytes <= enough


def test_what_reads_no_tensor_of_data_is_kept():
    """As the zeros that a loop's gradient begins with: a clone would be merged with them."""
    source = tanh_chain(6).replace(
        "a3 = MatMul(h2, r3)",
        "list = Snapshot(h2) : variant[]\nz = Exp(list) : f32[64,8]\n"
        "m = AddV2(h2, z) : f32[64,8]\na3 = MatMul(m, r3)",
    )
    graph, _, _ = rewritten(source, "recompute_all")
    same(source, graph)
    again = {graph.op(r.op).name for r in recomputed_in(graph)}
    assert "z" not in again and {"m", "a3"} <= again
