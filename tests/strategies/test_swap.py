"""Which values are swapped, for which of their uses, in which order, and how copies are shared."""

from __future__ import annotations

import pytest

from tests.strategies.step import chain, rewrite
from tflms.config import Config
from tflms.errors import ConfigError
from tflms.graph import text

BOTH = pytest.mark.parametrize("strategy", ["direct_order", "chain_rule"])


def readers(outcome, name):
    """Operations that read a value, directly or through a copy of its handle."""
    graph, found = outcome.graph, []
    values = [text.value_named(graph, name)]
    for value in values:
        for op in (graph.op(use.op) for use in graph.uses(value)):
            if op.role == "identity":
                values += op.outputs
            else:
                found.append(op.name)
    return sorted(found)


@BOTH
@pytest.mark.parametrize("fuse", [True, False])
def test_two_rewrites_give_the_same_text(strategy, fuse):
    settings = {"strategy": strategy, "lb": 2, "fuse_swapins": fuse, "swap_branches": True}
    assert rewrite(chain(9), **settings).after == rewrite(chain(9), **settings).after


@BOTH
def test_a_swapped_value_has_left_before_its_first_anchor(strategy):
    outcome = rewrite(chain(9), strategy=strategy)
    for one in outcome.swapped:
        name = outcome.graph.value_name(one.value)
        stays = [r for r in readers(outcome, name) if "--tflms/" not in r]
        last = max(outcome.level(r) for r in stays)
        assert all(last < outcome.level(a) for a in outcome.anchors(name).values())
        assert last == one.gone
        assert one.back == min(outcome.level(a) for a in outcome.anchors(name).values())


@BOTH
def test_all_late_readers_are_served(strategy):
    outcome = rewrite(chain(9), strategy=strategy)
    assert readers(outcome, "h4") == ["a5", "h4--tflms/swap_out"]
    assert sorted(outcome.anchors("h4")) == ["da4", "dw5"]


def test_a_value_whose_last_reader_has_no_anchor_stays():
    # The last reader of h4 comes long after all that might serve as an anchor. It keeps h4 on the
    # device, so swapping for the readers before it would free nothing.
    source = chain(9).replace(
        "train = NoOp() after ",
        "n1 = NoOp() after u1\nn2 = NoOp() after n1\nlate = Exp(h4) : f32[64,8] after n2\n"
        "sink = AssignSubVariableOp(w1, late) stateful\ntrain = NoOp() after sink, ",
    )
    assert "h4" in rewrite(chain(9), strategy="direct_order", ub=3).names()
    assert "h4" not in rewrite(source, strategy="direct_order", ub=3).names()
    # With an anchor far enough back it leaves again, and the late reader is served as well.
    assert "late" in rewrite(source, strategy="direct_order").anchors("h4")


@BOTH
@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_n_tensors_takes_the_farthest_reuse_first(strategy, count):
    every = rewrite(chain(9), strategy=strategy)
    assert every.names() == [f"h{i}" for i in range(1, 9)]  # the first layer's value waits longest
    some = rewrite(chain(9), strategy=strategy, n_tensors=count)
    assert some.names() == every.names()[:count]
    if count == 0:
        assert some.after == some.before


def test_of_equal_distances_the_larger_value_goes_first_then_the_older():
    source = """
        x = Placeholder() : f32[64,8]
        w = VarHandleOp() : resource[] stateful
        small = Tanh(x) : f32[4]
        big1 = Tanh(x) : f32[64,8]
        big2 = Tanh(x) : f32[64,8]
        a = AddN(small, big1, big2) : f32[64,8]
        b = Tanh(a) : f32[64,8]
        c = Tanh(b) : f32[64,8]
        loss = Sum(c) : f32[]
        g = Softmax(loss) : f32[64,8]
        d = Softmax(g) : f32[64,8]
        g1 = MatMul(small, d) : f32[8,8]
        g2 = MatMul(big2, d) : f32[8,8]
        g3 = MatMul(big1, d) : f32[8,8]
        gs = AddN(g1, g2, g3) : f32[8,8]
        train = AssignSubVariableOp(w, gs) stateful
    """
    assert rewrite(source, strategy="direct_order").names()[:3] == ["big1", "big2", "small"]


@BOTH
def test_smaller_values_are_left_alone(strategy):
    assert rewrite(chain(9), strategy=strategy, min_swap_bytes=2049).swapped == []
    assert rewrite(chain(9), strategy=strategy, min_swap_bytes=2048).swapped != []


def test_bytes_of_an_unknown_batch_are_counted_by_batch_size():
    source = chain(9).replace("f32[64,8]", "f32[?,8]")
    count = {
        size: len(
            rewrite(source, strategy="direct_order", min_swap_bytes=2048, batch_size=size).swapped
        )
        for size in (None, 63, 64)
    }
    assert count == {None: 8, 63: 0, 64: 8}  # what may be large is taken where no size is known


def scoped(*names):
    source = chain(6)
    for i, name in enumerate(names, 1):
        for old in (f"h{i}", f"a{i}"):
            for before in "( ,":
                for after in ") ,":
                    source = source.replace(f"{before}{old}{after}", f"{before}{name}/{old}{after}")
        source = source.replace(f"\nh{i} =", f"\n{name}/h{i} =").replace(
            f"\na{i} =", f"\n{name}/a{i} ="
        )
    return source


def test_scopes_match_whole_components():
    source = scoped("conv1", "conv10", "net/conv1", "conv1_2", "conv1/x")
    included = rewrite(source, strategy="direct_order", incl_scopes=["conv1"]).names()
    assert included == ["conv1/h1", "conv1/x/h5"]
    excluded = rewrite(source, strategy="direct_order", excl_scopes=["conv1"]).names()
    assert excluded == ["conv10/h2", "net/conv1/h3", "conv1_2/h4"]
    nested = rewrite(source, strategy="direct_order", incl_scopes=["net/conv1/"]).names()
    assert nested == ["net/conv1/h3"]


def test_exclusion_wins_over_inclusion():
    source = scoped("a", "a/b", "c")
    outcome = rewrite(source, strategy="direct_order", incl_scopes=["a"], excl_scopes=["a/b"])
    assert outcome.names() == ["a/h1"]


def test_types_are_included_and_excluded():
    source = chain(6).replace("h3 = Tanh", "h3 = Relu").replace("da3 = TanhGrad", "da3 = ReluGrad")
    only = rewrite(source, strategy="direct_order", incl_types=["Relu"]).names()
    assert only == ["h3"]
    without = rewrite(source, strategy="direct_order", excl_types=["Relu"]).names()
    assert without == ["h1", "h2", "h4", "h5"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("incl_scopes", "conv7", "no operation lies in the scope 'conv7'"),
        ("excl_scopes", "h", "no operation lies in the scope 'h'"),
        ("incl_types", "Conv2D", "no operation of type 'Conv2D'"),
        ("excl_types", "tanh", "no operation of type 'tanh'"),
    ],
)
def test_a_filter_that_meets_nothing_is_an_error(key, value, message):
    with pytest.raises(ConfigError, match=f"{key}: {message}"):
        rewrite(chain(3), strategy="direct_order", **{key: [value]})


@BOTH
def test_near_readers_share_a_swap_in_and_every_value_travels_out_once(strategy):
    fused = rewrite(chain(9), strategy=strategy)
    apart = rewrite(chain(9), strategy=strategy, fuse_swapins=False)
    for outcome, copies in ((fused, 1), (apart, 2)):
        graph = outcome.graph
        for one in outcome.swapped:
            outs = [u for u in graph.uses(one.value) if graph.op(u.op).role == "swap_out"]
            assert len(outs) == 1
            assert len(one.groups) == copies
            ins = [graph.op(w).inputs[0] for w, _ in one.groups]
            assert set(ins) == {graph.op(one.swap_out).outputs[0]}


def test_fuse_distance_parts_readers_that_are_far_from_each_other():
    source = chain(9).replace(
        "train = NoOp() after ",
        "late = MatMul(h7, da2) : f32[8,8]\nsink = AssignSubVariableOp(w1, late) stateful\n"
        "train = NoOp() after sink, ",
    )
    for distance, groups in ((0, 3), (2, 2), (100, 1)):
        outcome = rewrite(source, strategy="direct_order", fuse_distance=distance)
        (one,) = [s for s in outcome.swapped if outcome.graph.value_name(s.value) == "h7"]
        assert len(one.groups) == groups
        read = sorted(outcome.graph.op(u.op).name for _, uses in one.groups for u in uses)
        assert read == ["da7", "dw8", "late"]


SKIP = """
x = Placeholder() : f32[64,8]
w = VarHandleOp() : resource[] stateful
skip = Softmax(x) : f32[64,8]
s1 = Softmax(skip) : f32[64,8]
s2 = Softmax(s1) : f32[64,8]
s3 = Softmax(s2) : f32[64,8]
s4 = Softmax(s3) : f32[64,8]
join = ConcatV2(s4, skip) : f32[64,16]
loss = Sum(join) : f32[]
d1 = Fill(loss, loss) : f32[64,16]
d2 = Slice(d1) : f32[64,8]
d3 = Softmax(d2) : f32[64,8]
d4 = Softmax(d3) : f32[64,8]
dw = MatMul(skip, d4) : f32[8,8]
train = AssignSubVariableOp(w, dw) stateful
"""


@BOTH
def test_a_skip_connection_is_swapped_when_branches_are_asked_for(strategy):
    plain = rewrite(SKIP, strategy=strategy)
    assert sorted(plain.anchors("skip")) == ["dw"]
    branches = rewrite(SKIP, strategy=strategy, swap_branches=True, fuse_swapins=False)
    assert sorted(branches.anchors("skip")) == ["dw", "join"]
    rules = [done.rule for done in branches.engine.applied]
    assert "swap_branch" in rules
    assert "fuse_swap_outs" in rules
    assert readers(branches, "skip") == ["s1", "skip--tflms/swap_out"]


@BOTH
def test_branch_threshold_is_the_distance_that_is_not_far_yet(strategy):
    # join lies five levels behind skip
    for threshold, uses in ((4, ["dw", "join"]), (5, ["dw"])):
        outcome = rewrite(SKIP, strategy=strategy, swap_branches=True, branch_threshold=threshold)
        assert sorted(outcome.anchors("skip")) == uses


def test_a_value_in_two_slots_is_served_in_both():
    source = chain(6).replace("da3 = TanhGrad(h3, dh3)", "da3 = SelectV2(h3, dh3, h3)")
    outcome = rewrite(source, strategy="direct_order")
    graph = outcome.graph
    node = graph.op(text.op_named(graph, "da3"))
    made = [graph.producer(v).name for v in node.inputs]
    assert made == ["h3--tflms/swap_in", "dh3", "h3--tflms/swap_in"]


def test_each_output_of_an_operation_is_looked_at_on_its_own():
    source = (
        chain(6)
        .replace(
            "h2 = Tanh(a2) : f32[64,8]",
            "two = Split(a2) : f32[64,8], f32[64,8], i32[64,8]\nh2 = Mul(two, two:1) : f32[64,8]",
        )
        .replace("da2 = TanhGrad(h2, dh2)", "da2 = SelectV2(two:2, dh2, two:1)")
    )
    outcome = rewrite(source, strategy="direct_order")
    assert {"two:1", "two:2"} <= set(outcome.names())
    assert "two" not in outcome.names()


@pytest.mark.parametrize(
    "line",
    [
        "h3 = TheirOwnKernel(a3) : f32[64,8]",
        "h3 = RandomUniform(a3) : f32[64,8] stateful",
        "h3 = Tanh(a3) : f32[64,8] stateful",
        "h3 = PartitionedCall(a3) : f32[64,8]",
    ],
)
def test_what_may_have_an_effect_is_left_alone(line):
    source = chain(6).replace("h3 = Tanh(a3) : f32[64,8]", line)
    outcome = rewrite(source, strategy="direct_order")
    assert "h3" not in outcome.names()
    assert "h2" in outcome.names()


def test_a_config_object_and_keywords_mean_the_same():
    config = Config(strategy="direct_order", lb=3, min_swap_bytes=0)
    one = rewrite(chain(6), config)
    assert one.after == rewrite(chain(6), strategy="direct_order", lb=3).after


def test_a_reader_that_is_only_waited_for_is_not_served():
    # So tf.gradients builds the gradient of a constant exponent: nobody reads it, and TensorFlow
    # drops it. A swap-in for it would stay behind as something to wait for.
    source = chain(6).replace(
        "train = NoOp() after ",
        "log = Mul(h3, da3) : f32[64,8]\ndead = Tanh(log) : f32[64,8]\n"
        "tied = NoOp() after dead\ntrain = NoOp() after tied, ",
    )
    outcome = rewrite(source, strategy="direct_order")
    assert sorted(outcome.anchors("h3")) == ["da3", "dw4"]
    assert readers(outcome, "h3") == ["a4", "h3--tflms/swap_out", "log"]
