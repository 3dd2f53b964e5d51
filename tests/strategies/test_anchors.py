"""Where the anchor lies: as far before the use as asked, on the way to it, in its frame."""

from __future__ import annotations

import networkx as nx
import pytest

from tests.strategies.step import chain, rewrite
from tflms.graph import text


def view(graph):
    """The user's operations as networkx sees them, loops opened."""
    found = nx.DiGraph()
    for op in graph.ops():
        found.add_node(op.name)
        for value in op.inputs:
            before = graph.producer(value)
            if not (op.type == "Merge" and before.type == "NextIteration"):
                found.add_edge(before.name, op.name)
        for before in op.controls:
            found.add_edge(graph.op(before).name, op.name)
    return found


@pytest.mark.parametrize("lb", [1, 2, 3, 5, 8])
def test_direct_order_anchors_exactly_lb_levels_before_the_use(lb):
    outcome = rewrite(chain(12), strategy="direct_order", lb=lb, fuse_swapins=False)
    distances = [
        outcome.level(use) - outcome.level(anchor)
        for i in range(1, 6)
        for use, anchor in outcome.anchors(f"h{i}").items()
    ]
    assert len(distances) == 10  # two late uses of each
    assert set(distances) == {lb}


@pytest.mark.parametrize("strategy", ["direct_order", "chain_rule"])
@pytest.mark.parametrize(("lb", "ub"), [(1, 1), (2, 3), (4, 9), (3, 10000)])
def test_the_distance_lies_between_lb_and_ub(strategy, lb, ub):
    outcome = rewrite(chain(12), strategy=strategy, lb=lb, ub=ub, fuse_swapins=False)
    assert outcome.swapped
    for name in outcome.names():
        for use, anchor in outcome.anchors(name).items():
            assert lb <= outcome.level(use) - outcome.level(anchor) <= ub


@pytest.mark.parametrize("strategy", ["direct_order", "chain_rule"])
def test_the_anchor_reaches_the_use_and_lies_behind_the_turn(strategy):
    source = chain(10)
    outcome = rewrite(source, strategy=strategy, lb=2)
    user = view(text.parse(source))
    backward = set(user) - nx.ancestors(user, "loss") - {"loss"}
    assert len(outcome.swapped) >= 8
    for name in outcome.names():
        for use, anchor in outcome.anchors(name).items():
            assert nx.has_path(user, anchor, use)
            assert anchor in backward


def test_chain_rule_anchors_at_the_gradient_of_the_next_layers():
    # One hop behind h3 are a4, whose value nobody reads late, and from there h4 on: its gradient
    # da4 is the first late operation that belongs to the forward operations behind h3.
    outcome = rewrite(chain(12), strategy="chain_rule", lb=1, fuse_swapins=False)
    assert outcome.anchors("h3") == {"dw4": "da4", "da3": "da4"}


def test_chain_rule_looks_lb_hops_behind_the_value():
    outcome = rewrite(chain(12), strategy="chain_rule", lb=4, fuse_swapins=False)
    # Hops 1 to 4 behind h3: a4, h4, a5, h5. The gradients of h5 are da5, and dw6, which reaches
    # nothing of what reads h3.
    assert outcome.anchors("h3")["da3"] == "da5"


def test_chain_rule_falls_back_near_the_turn():
    direct = rewrite(chain(6), strategy="direct_order", lb=3)
    by_chain = rewrite(chain(6), strategy="chain_rule", lb=3)
    assert by_chain.anchors("h5") == direct.anchors("h5")


def test_an_anchor_on_another_branch_is_passed_over():
    # dside is a late operation of the next hop, closer to the use than any other, and not on
    # the way to it: the original picked such operations.
    source = chain(6).replace(
        "train = NoOp() after ",
        "dside = TanhGrad(h3, da3) : f32[64,8]\nsink = AssignSubVariableOp(w1, dside) stateful\n"
        "train = NoOp() after sink, ",
    )
    outcome = rewrite(source, strategy="chain_rule", fuse_swapins=False)
    assert "da2" in outcome.anchors("h2")
    assert "dside" not in outcome.anchors("h2").values()


@pytest.mark.parametrize("strategy", ["direct_order", "chain_rule"])
def test_no_swap_between_neighbouring_levels_or_without_an_anchor(strategy):
    outcome = rewrite(chain(4), strategy=strategy, lb=1)
    # h4 is read by the loss and, two levels on, by its gradient: nothing to wait for lies between.
    assert "h4" not in outcome.names()
    far = rewrite(chain(4), strategy=strategy, lb=50)
    assert far.swapped == []
    assert far.after == far.before


def test_an_operation_that_grappler_merges_is_no_anchor():
    # Every second operation on the way back is a BiasAdd, which may be fused with the product
    # before it; that product may not be waited for either.
    source = chain(6)
    for i in range(1, 6):
        source = source.replace(
            f"dh{i} = MatMul(da{i + 1}, r{i + 1}) : f32[64,8]",
            f"p{i} = MatMul(da{i + 1}, r{i + 1}) : f32[64,8]\n"
            f"dh{i} = BiasAdd(p{i}, one) : f32[64,8]",
        )
    outcome = rewrite(source, strategy="direct_order", lb=1, fuse_swapins=False)
    anchors = {a for name in outcome.names() for a in outcome.anchors(name).values()}
    assert anchors
    assert {a[:2] for a in anchors} == {"da"}


def test_a_shape_or_a_scalar_is_no_anchor():
    source = chain(6).replace(
        "dh3 = MatMul(da4, r4) : f32[64,8]",
        "n3 = Sum(da4) : f32[]\ns3 = Shape(da4) : i32[2]\n"
        "dh3 = Conv2DBackpropInput(s3, n3) : f32[64,8]",
    )
    outcome = rewrite(source, strategy="direct_order", lb=1, fuse_swapins=False)
    anchors = {a for name in outcome.names() for a in outcome.anchors(name).values()}
    assert "dh3" in anchors
    assert not {"n3", "s3"} & anchors


LOOP = """
x = Placeholder() : f32[64,8]
w = VarHandleOp() : resource[] stateful
r = ReadVariableOp(w) : f32[8,8]
h1 = Tanh(x) : f32[64,8]
h2 = MatMul(h1, r) : f32[64,8]
loss = Sum(h2) : f32[]
dh2 = Fill(loss, loss) : f32[64,8]
e = Enter(dh2) : f32[64,8] entering loop
m = Merge(e, n) : f32[64,8], i32[] frame /loop
p = Const() : bool[] frame /loop
s = Switch(m, p) : f32[64,8], f32[64,8] frame /loop
t = TanhGrad(s:1, s:1) : f32[64,8] frame /loop
n = NextIteration(t) : f32[64,8] frame /loop
out = Exit(s) : f32[64,8] frame /loop
dh1 = MatMul(out, r) : f32[64,8]
dx = TanhGrad(h1, dh1) : f32[64,8]
dw = MatMul(h1, dx) : f32[8,8]
train = AssignSubVariableOp(w, dw) stateful
"""


@pytest.mark.parametrize("strategy", ["direct_order", "chain_rule"])
def test_an_anchor_lies_in_the_frame_of_its_use(strategy):
    near = rewrite(LOOP, strategy=strategy, fuse_swapins=False)
    assert near.anchors("h1") == {"dx": "dh1", "dw": "dx"}
    # Three and more levels before dx there are only operations of the loop.
    for lb in (3, 4, 5):
        assert rewrite(LOOP, strategy=strategy, lb=lb).swapped == []


def test_values_in_a_loop_are_left_alone():
    outcome = rewrite(LOOP, strategy="direct_order", swap_branches=True)
    assert not {"t", "s", "s:1", "m"} & set(outcome.names())
