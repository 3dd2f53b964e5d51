"""Steps written as text: how they are cut, and that schedules rewrite them to the same step."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.props.oracle import Text
from tests.strategies.step import chain as tanh_chain
from tflms import checkpointing
from tflms.checkpointing import strategy
from tflms.checkpointing.execute import recomputed_in
from tflms.checkpointing.stages import cut
from tflms.checkpointing.weigh import weigh
from tflms.config import CHECKPOINTING, WITHOUT_LIMIT, Config
from tflms.errors import ConfigError, GraphError, InfeasibleError
from tflms.graph import erase, order, text
from tflms.graph.verify import verify
from tflms.planning import cost, simulate

# Blocks y = x + Tanh(x w), whose skip makes the sum the only point to cut at; d3 is the gradient
# of x3 and so on. A frozen layer comes first, a moving average and a metric are on the side.
RESIDUAL = """
x = Placeholder() : f32[64,8]
one = Const() : f32[]
w0 = VarHandleOp() : resource[] stateful
r0 = ReadVariableOp(w0) : f32[8,8]
a0 = MatMul(x, r0) : f32[64,8]
x0 = Tanh(a0) : f32[64,8]
w1 = VarHandleOp() : resource[] stateful
r1 = ReadVariableOp(w1) : f32[8,8]
a1 = MatMul(x0, r1) : f32[64,8]
h1 = Tanh(a1) : f32[64,8]
x1 = AddV2(x0, h1) : f32[64,8]
w2 = VarHandleOp() : resource[] stateful
r2 = ReadVariableOp(w2) : f32[8,8]
a2 = MatMul(x1, r2) : f32[64,8]
h2 = Tanh(a2) : f32[64,8]
x2 = AddV2(x1, h2) : f32[64,8]
w3 = VarHandleOp() : resource[] stateful
r3 = ReadVariableOp(w3) : f32[8,8]
a3 = MatMul(x2, r3) : f32[64,8]
h3 = Tanh(a3) : f32[64,8]
x3 = AddV2(x2, h3) : f32[64,8]
loss = Sum(x3) : f32[]
moving = VarHandleOp() : resource[] stateful
average = AssignSubVariableOp(moving, h1) stateful
metric = Neg(x3) : f32[64,8]
d3 = Fill(one, loss) : f32[64,8]
t3 = TanhGrad(h3, d3) : f32[64,8]
g3 = MatMul(x2, t3) : f32[8,8]
b3 = MatMul(t3, r3) : f32[64,8]
d2 = AddN(d3, b3) : f32[64,8]
t2 = TanhGrad(h2, d2) : f32[64,8]
g2 = MatMul(x1, t2) : f32[8,8]
b2 = MatMul(t2, r2) : f32[64,8]
d1 = AddN(d2, b2) : f32[64,8]
t1 = TanhGrad(h1, d1) : f32[64,8]
g1 = MatMul(x0, t1) : f32[8,8]
u1 = AssignSubVariableOp(w1, g1) stateful
u2 = AssignSubVariableOp(w2, g2) stateful
u3 = AssignSubVariableOp(w3, g3) stateful
train = NoOp() after u1, u2, u3, average, metric
"""


def read(source, loss="loss"):
    graph = text.parse(source)
    phases = order.phases(
        graph, loss=text.value_named(graph, loss), targets=[text.op_named(graph, "train")]
    )
    return graph, phases


def names(graph, values):
    return [graph.value_name(v) for v in values]


def ends(found):
    """What each stage but the last hands to the next one, by name."""
    return [", ".join(names(found.graph, values)) for values in found.outputs]


def rewritten(source, name, limit=None):
    graph, phases = read(source)
    edges = erase.edges(graph)
    weights = cost.sizes(graph)
    config = Config(strategy=name, memory_limit=limit)
    if isinstance(limit, float):
        step = {op.id for op in graph.ops() if phases.step[op.id]}
        limit = int(limit * simulate.simulate(graph, weights, step).peak_bytes)
    costs = cost.static_costs(graph, weights)
    done = strategy.run(graph, phases, config, costs, limit)
    verify(graph)
    erase.check(graph, edges)
    return graph, done


def same(source, graph):
    """The step means what it meant, has no cycle, and the loss alone needs nothing new."""
    before, after = Text(source), Text(text.dump(graph))
    assert nx.is_directed_acyclic_graph(after.digraph())
    old, new = before.meaning(), after.meaning()
    assert {op: new[op] for op in old} == old
    assert after.runs(["loss"]) == before.runs(["loss"])
    assert after.runs(["train"]) & set(before.type) <= before.runs(["train"])


# how it is cut ------------------------------------------------------------------------------------


def test_a_chain_is_cut_behind_every_activation_that_its_gradients_read():
    graph, phases = read(tanh_chain(5))
    found = cut(graph, phases)
    # Nothing could wait for the gradient of h5, which is made of a constant: no cut there.
    assert ends(found) == ["h1", "h2", "h3", "h4"]
    assert [[graph.op(op).name for op in ops] for ops in found.forward[1:4]] == [
        ["a2", "h2"], ["a3", "h3"], ["a4", "h4"]
    ]  # fmt: skip
    gradients = [graph.op(found.spine.ops[turn]).name for turn in found.turns[1:5]]
    assert gradients == ["dh1", "dh2", "dh3", "dh4"]


def test_gradients_are_told_from_averages_and_metrics_and_belong_to_their_stages():
    graph, phases = read(RESIDUAL)
    found = cut(graph, phases)
    assert ends(found) == ["x1", "x2"]
    told = [{graph.op(op).name for op in ops} for ops in found.backward]
    assert {"t1", "g1"} <= told[0]
    assert {"t2", "g2", "b2", "d1"} <= told[1]
    assert {"t3", "g3", "b3", "d2"} <= told[2]
    assert not {"average", "metric"} & set().union(*told)


def test_frozen_layers_belong_to_no_stage_and_their_result_is_the_data():
    graph, phases = read(RESIDUAL)
    found = cut(graph, phases)
    assert "x0" in names(graph, found.inputs)
    assert text.op_named(graph, "a0") not in found.stage


def test_a_random_mask_is_an_input_and_its_use_runs_again():
    source = tanh_chain(4).replace(
        "a3 = MatMul(h2, r3) : f32[64,8]",
        "shape = Const() : i32[2]\n"
        "u = RandomUniform(shape) : f32[64,8] stateful\n"
        "m2 = Mul(h2, u) : f32[64,8]\n"
        "a3 = MatMul(m2, r3) : f32[64,8]",
    )
    source = source.replace("dw3 = MatMul(h2, da3)", "dw3 = MatMul(m2, da3)")
    source = source.replace(
        "dh2 = MatMul(da3, r3) : f32[64,8]",
        "dm2 = MatMul(da3, r3) : f32[64,8]\ndh2 = Mul(dm2, u) : f32[64,8]",
    )
    graph, _ = rewritten(source, "recompute_all")
    again = {graph.op(r.op).name for r in recomputed_in(graph)}
    assert "m2" in again and "u" not in again
    same(source, graph)


def test_a_step_whose_gradients_do_not_go_back_is_refused():
    source = """
    x = Placeholder() : f32[64,8]
    one = Const() : f32[]
    w = VarHandleOp() : resource[] stateful
    r = ReadVariableOp(w) : f32[8,8]
    a = MatMul(x, r) : f32[64,8]
    loss = Sum(a) : f32[]
    s = Neg(a) : f32[64,8]
    g = MatMul(x, s) : f32[8,8]
    u = AssignSubVariableOp(w, g) stateful
    train = NoOp() after u, s
    """
    graph, phases = read(source)
    with pytest.raises(GraphError, match="no gradients"):
        cut(graph, phases)


@pytest.mark.parametrize("limit", [0.25, 0.3, 0.36, 0.43, 0.5, 0.6])
def test_no_rival_executes_more_quickly_than_the_optimum_within_a_limit(limit):
    source = tanh_chain(16)
    _, best = rewritten(source, "optimal_checkpointing", limit)
    for name in ("revolve_heterogeneous", "best_periodic", "sqrt_n", "revolve", "drop_inputs"):
        try:
            _, rival = rewritten(source, name, limit)
        except InfeasibleError:
            continue
        if name == "drop_inputs":
            assert rival.timeline.seconds <= best.timeline.seconds * 1.0001
        else:
            assert best.timeline.seconds <= rival.timeline.seconds * 1.0001, name


# what it must not round otherwise -----------------------------------------------------------------

WIDE = "f32[64,8]"


def with_middle(middle, result):
    """A chain whose third layer reads what some lines make of the second one's result."""
    return tanh_chain(5).replace(
        f"a3 = MatMul(h2, r3) : {WIDE}", f"{middle}\na3 = MatMul({result}, r3) : {WIDE}"
    )


def test_operands_of_a_sum_of_three_are_kept_and_the_sum_is_not_repeated():
    source = with_middle(
        f"e2 = Exp(h2) : {WIDE}\ns2 = Sin(e2) : {WIDE}\nt2 = AddN(h2, e2, s2) : {WIDE}", "t2"
    ).replace("dw3 = MatMul(h2, da3)", f"k2 = Mul(e2, s2) : {WIDE}\ndw3 = MatMul(k2, da3)")
    graph, _ = rewritten(source, "recompute_all")
    again = {graph.op(r.op).name for r in recomputed_in(graph)}
    assert "a1" in again and again.isdisjoint({"t2", "e2", "s2"})
    same(source, graph)


def test_a_row_of_products_with_three_constants_is_refused():
    source = with_middle(
        "c = Const() : f32[]\n"
        f"p2 = Mul(h2, c) : {WIDE}\nq2 = Mul(c, p2) : {WIDE}\nt2 = Mul(q2, c) : {WIDE}", "t2"
    )  # fmt: skip
    with pytest.raises(GraphError, match=r"three constant factors or more.*multiply them in the"):
        rewritten(source, "recompute_all")


# what it costs ------------------------------------------------------------------------------------


def test_sizes_of_stages_come_from_the_graph():
    graph, phases = read(tanh_chain(5))
    weights = cost.sizes(graph)
    found = weigh(cut(graph, phases), weights, cost.static_costs(graph, weights))
    layer = 64 * 8 * 4
    assert found.activation_bytes == (layer,) * 5 + (0,)
    assert found.saved_bytes == (layer,) * 4 + (layer + 256,)  # the last one holds the loss too
    assert found.stages == 5
    assert all(seconds > 0 for seconds in found.forward_seconds)
    assert all(seconds > 0 for seconds in found.backward_seconds)


def test_inner_activations_that_gradients_read_are_saved_and_need_no_room_otherwise():
    graph, phases = read(RESIDUAL)
    weights = cost.sizes(graph)
    found = weigh(cut(graph, phases), weights, cost.static_costs(graph, weights))
    layer = 64 * 8 * 4
    assert found.saved_bytes[:2] == (2 * layer, 2 * layer)  # h and x
    assert found.activation_bytes[:3] == (layer, layer, layer)


# what is rewritten --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTING)
@pytest.mark.parametrize("source", [tanh_chain(9), RESIDUAL], ids=["chain", "residual"])
def test_every_strategy_keeps_the_meaning(name, source):
    limit = None if name in WITHOUT_LIMIT else 0.93
    graph, done = rewritten(source, name, limit)
    same(source, graph)
    one_segment = name == "periodic" and source == RESIDUAL  # of the two stages before the loss
    assert bool(recomputed_in(graph)) == (name != "save_all" and not one_segment)
    plain = rewritten(source, "save_all")[1].timeline.peak_bytes
    assert done.timeline.peak_bytes <= (limit or 1.0) * plain


def test_a_forward_of_the_schedule_that_runs_again_is_one_set_of_clones():
    graph, done = rewritten(tanh_chain(9), "periodic")
    starts = [step.operation for step in done.schedule.replay().steps]
    forwards = [stage for kind, stage in starts if kind is not checkpointing.Kind.B]
    products = [r for r in recomputed_in(graph) if graph.op(r.op).type == "MatMul"]
    again = {stage for stage in forwards if forwards.count(stage) > 1 and stage <= 9}
    # The last stage of a segment runs again only for its input: its output was kept.
    stage_of = done.cut.stage
    assert {stage_of[r.op] for r in products} <= again
    assert all(len(r.clones) == 1 for r in products)
    assert len(products) >= len(again) - 3


def test_recomputing_all_runs_early_layers_as_often_as_there_are_later_ones():
    graph, _ = rewritten(tanh_chain(6), "recompute_all")
    clones = {graph.op(r.op).name: len(r.clones) for r in recomputed_in(graph)}
    assert [clones.get(f"a{i}", 0) for i in range(1, 7)] == [5, 4, 3, 2, 1, 0]


def test_what_runs_again_waits_for_the_gradient_behind_it():
    graph, _ = rewritten(tanh_chain(6), "recompute_all")
    seeds = [op for op in graph.ops() if op.role == "seed"]
    assert seeds
    level = order.levels(graph, order.topological(graph), {op.id for op in graph.ops()})
    for seed in seeds:
        anchor = graph.op(seed.controls[0])
        assert anchor.name.startswith(("da", "dh")) or anchor.role == "identity"
        assert level[seed.id] > level[text.op_named(graph, "loss")]


def test_the_peak_falls_with_the_limit():
    source = tanh_chain(24)
    peaks = [
        rewritten(source, "optimal_checkpointing", limit)[1].timeline.peak_bytes
        for limit in (0.9, 0.75, 0.65)
    ]
    plain = rewritten(source, "save_all")[1].timeline.peak_bytes
    assert all(peak <= limit * plain for peak, limit in zip(peaks, (0.9, 0.75, 0.65), strict=True))
    assert peaks[0] > peaks[2]


def test_a_limit_that_no_schedule_keeps_is_refused_with_the_least_one():
    with pytest.raises(InfeasibleError) as caught:
        rewritten(tanh_chain(6), "optimal_checkpointing", 0.1)
    assert caught.value.minimum_bytes
    assert "6" in str(caught.value) or "7" in str(caught.value)


@pytest.mark.parametrize("name", [n for n in CHECKPOINTING if n not in WITHOUT_LIMIT])
def test_a_strategy_that_needs_a_limit_says_so(name):
    with pytest.raises(ConfigError, match="memory_limit"):
        Config(strategy=name)


SCHEDULES = st.sampled_from([n for n in CHECKPOINTING if n != "save_all"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SCHEDULES, st.integers(2, 14), st.floats(0.5, 0.99), st.sampled_from(["Tanh", "Relu"]))
def test_random_chains_keep_their_meaning_and_the_limit(name, layers, limit, activation):
    source = tanh_chain(layers, activation=activation)
    chosen = None if name in WITHOUT_LIMIT else limit
    plain = rewritten(source, "save_all")[1].timeline.peak_bytes
    try:
        graph, done = rewritten(source, name, chosen)
    except InfeasibleError as error:
        assert error.minimum_bytes is None or error.minimum_bytes > limit * plain - 1
        return
    same(source, graph)
    if chosen is not None:
        assert done.timeline.peak_bytes <= limit * plain
