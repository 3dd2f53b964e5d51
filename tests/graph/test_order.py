"""Order, levels, branches and phases, on graphs small enough to say what must come out."""

from __future__ import annotations

import pytest

from tflms.errors import GraphError, InvariantError
from tflms.graph import order, text

STEP = """
x = Placeholder() : f32[64,8]
w = VarHandleOp() : resource[] stateful
r = ReadVariableOp(w) : f32[8,8]
a = MatMul(x, r) : f32[64,8]
h = Tanh(a) : f32[64,8]
loss = Sum(h) : f32[]
one = Const() : f32[]
dh = Fill(one) : f32[64,8]
da = TanhGrad(h, dh) : f32[64,8]
dw = MatMul(x, da) : f32[8,8]
train = AssignSubVariableOp(w, dw) stateful
aside = Exp(x) : f32[64,8]
"""


def ids(graph, *names):
    return [text.op_named(graph, name) for name in names]


def phases(graph, loss="loss", targets=("train",)):
    value = None if loss is None else text.value_named(graph, loss)
    return order.phases(graph, loss=value, targets=ids(graph, *targets))


def names(graph, ops):
    return [graph.op(op).name for op in ops]


def test_each_operation_comes_after_what_it_waits_for():
    graph = text.parse(STEP)
    found = order.topological(graph)
    place = {op: i for i, op in enumerate(found)}
    assert sorted(found) == list(range(12))
    for op in graph.ops():
        for v in op.inputs:
            assert place[graph.value(v).op] < place[op.id]


def test_lines_in_any_order_are_ordered():
    lines = STEP.strip().splitlines()
    graph = text.parse("\n".join(reversed(lines)))
    found = names(graph, order.topological(graph))
    assert found.index("x") < found.index("a") < found.index("h") < found.index("train")


def test_a_level_is_the_longest_way_from_a_source():
    graph = text.parse(STEP)
    p = phases(graph)
    level = {op.name: p.level[op.id] for op in graph.ops()}
    assert level == {
        "x": 0, "w": 0, "one": 0, "r": 1, "dh": 1, "a": 2, "h": 3,
        "loss": 4, "da": 4, "dw": 5, "train": 6, "aside": -1,
    }  # fmt: skip


def test_phases_are_found_by_reachability():
    graph = text.parse(STEP)
    p = phases(graph)
    forward = {op.name for op in graph.ops() if p.forward[op.id]}
    assert forward == {"x", "w", "r", "a", "h", "loss"}
    assert {op.name for op in graph.ops() if not p.step[op.id]} == {"aside"}
    assert p.backward_start == 4  # h, the deepest value that goes back, lies on level 3
    assert [op.name for op in graph.ops() if p.late(op.id)] == ["da", "dw", "train"]


def test_activations_come_from_data_and_not_from_variables_alone():
    graph = text.parse(STEP + "c = Const() : f32[256]\nd = Exp(c) : f32[256]\ne = Exp(one) : f32[]")
    p = phases(graph)
    active = {op.name for op in graph.ops() if op.outputs and p.activation[op.outputs[0]]}
    assert active == {"x", "a", "h", "loss", "da", "dw", "aside", "c", "d"}


def test_without_a_loss_the_turn_is_where_most_bytes_are_alive():
    graph = text.parse(STEP)
    p = phases(graph, loss=None, targets=("train",))
    forward = {op.name for op in graph.ops() if p.forward[op.id]}
    assert {"a", "x"} <= forward
    assert "train" not in forward
    assert "dw" not in forward


def test_without_targets_the_step_is_what_overwrites_variables_with_data():
    graph = text.parse(STEP + "c = Const() : f32[8,8]\ninit = AssignVariableOp(w, c) stateful")
    p = order.phases(graph, loss=text.value_named(graph, "loss"))
    assert {op.name for op in graph.ops() if not p.step[op.id]} == {"aside", "c", "init"}


def test_a_step_without_gradients_is_refused_with_what_to_pass():
    graph = text.parse(STEP)
    with pytest.raises(GraphError, match=r"no gradient ops reach back from 'loss'.*fetches="):
        phases(graph, targets=("loss",))


def test_a_cycle_is_an_error():
    graph = text.parse("a = Exp(b) : f32[]\nb = Exp(a) : f32[]")
    with pytest.raises(InvariantError, match=r"close a cycle: '(a' -> 'b' -> 'a|b' -> 'a' -> 'b)'"):
        order.topological(graph)


def test_an_order_may_be_asked_to_agree_with_further_edges():
    graph = text.parse(STEP)
    aside, x, h = ids(graph, "aside", "x", "h")
    agreed = order.with_edges(graph, order.topological(graph), [(h, aside)])
    assert sorted(agreed) == list(range(12))
    assert agreed.index(x) < agreed.index(h) < agreed.index(aside)
    assert order.with_edges(graph, order.topological(graph), [(h, x)]) is None


def test_reach_answers_whether_one_operation_runs_before_another():
    graph = text.parse(STEP)
    position = [0] * graph.size
    for place, op in enumerate(order.topological(graph)):
        position[op] = place
    reach = order.Reach(graph, position)
    x, a, train, aside = ids(graph, "x", "a", "train", "aside")
    assert reach.precedes(x, train)
    assert reach.precedes(a, train)
    assert not reach.precedes(train, a)
    assert not reach.precedes(a, aside)
    assert not reach.precedes(a, a)


COND = """
x = Placeholder() : f32[8]
p = Placeholder() : bool[]
s = Switch(x, p) : f32[8], f32[8]
no = Exp(s) : f32[8]
yes = Tanh(s:1) : f32[8]
q = Placeholder() : bool[]
s2 = Switch(yes, q) : f32[8], f32[8]
inner = Neg(s2:1) : f32[8]
waits = NoOp() after inner
m2 = Merge(inner, s2) : f32[8], i32[]
m = Merge(no, m2) : f32[8], i32[]
out = Neg(m) : f32[8]
"""


def test_a_branch_is_left_at_its_merge():
    graph = text.parse(COND)
    found = order.guards(graph, order.topological(graph))
    p, q = (text.value_named(graph, name) for name in "pq")
    guard = {op.name: found[op.id] for op in graph.ops()}
    assert guard["x"] == guard["s"] == guard["m"] == guard["out"] == frozenset()
    assert guard["no"] == {(p, 0)}
    assert guard["yes"] == guard["s2"] == guard["m2"] == {(p, 1)}
    assert guard["inner"] == guard["waits"] == {(p, 1), (q, 1)}
