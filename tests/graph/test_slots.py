"""An IdentityN is read slot by slot, unless something rests on its waiting for all inputs."""

from __future__ import annotations

import pytest

from tflms.graph import order, slots, text
from tflms.graph.verify import verify

STEP = """
x = Placeholder() : f32[64,8]
w = VarHandleOp() : resource[] stateful
v = VarHandleOp() : resource[] stateful
rw = ReadVariableOp(w) : f32[8,8] stateful
rv = ReadVariableOp(v) : f32[8,8] stateful
a = MatMul(x, rw) : f32[64,8]
b = MatMul(a, rv) : f32[64,8]
db = Tanh(b) : f32[64,8]
dv = MatMul(a, db) : f32[8,8]
da = MatMul(db, rv) : f32[64,8]
dw = MatMul(x, da) : f32[8,8]
both = IdentityN(dv, dw) : f32[8,8], f32[8,8]
uv = AssignSubVariableOp(v, both) stateful
uw = AssignSubVariableOp(w, both:1) stateful
"""


def split(source, *, whole_runs=False):
    graph = text.parse(source)
    return graph, slots.split(graph, whole_runs=whole_runs)


def before(graph, name):
    return {graph.op(op).name for op in order.ancestors(graph, [text.op_named(graph, name)])}


def test_each_update_needs_its_own_gradient_alone():
    graph, made = split(STEP)
    assert "dw" not in before(graph, "uv") and "dv" in before(graph, "uv")
    both = text.op_named(graph, "both")
    assert [graph.op(slot).name for slot in made] == ["both:0", "both:1"]
    assert list(made.values()) == [(both, 0), (both, 1)]
    verify(graph)


def test_the_operation_stays_with_all_its_inputs_for_those_who_fetch_it():
    graph, _ = split(STEP)
    assert {"dv", "dw"} <= before(graph, "both")
    assert not any(graph.uses(v) for v in graph.op(text.op_named(graph, "both")).outputs)


def test_who_waits_for_it_still_waits_for_all():
    graph, made = split(STEP + "done = NoOp() after both\n")
    assert made
    assert {"dv", "dw"} <= before(graph, "done")


def test_one_behind_another_is_seen_through():
    again = "again = IdentityN(both:1, both) : f32[8,8], f32[8,8]\nlate = Neg(again) : f32[8,8]\n"
    graph, made = split(STEP + again)
    assert len(made) == 4
    assert "dv" not in before(graph, "late") and "dw" in before(graph, "late")


LATE_READ = STEP.replace("a, db) : f32[8,8]", "a, db) : f32[8,8] after rw2").replace(
    "dw = MatMul(x, da)", "rw2 = ReadVariableOp(w) : f32[8,8] stateful\ndw = MatMul(x, da)"
)


def test_a_read_that_only_the_tie_keeps_before_the_update_keeps_the_tie():
    graph, made = split(LATE_READ)
    assert not made
    assert "rw2" in before(graph, "uw")


def test_a_read_that_a_control_edge_keeps_before_the_update_does_not():
    _, made = split(LATE_READ.replace("both:1) stateful", "both:1) stateful after rw2"))
    assert len(made) == 2


def test_an_effect_that_only_the_tie_drags_into_a_run_keeps_it_in_a_graph_of_a_session():
    counted = STEP.replace(
        "dw = MatMul(x, da) : f32[8,8]",
        "n = VarHandleOp() : resource[] stateful\n"
        "count = AssignAddVariableOp(n, x) stateful\n"
        "dw = MatMul(x, da) : f32[8,8] after count",
    )
    graph, made = split(counted)
    assert not made and "count" in before(graph, "uv")
    assert len(split(counted, whole_runs=True)[1]) == 2  # a function runs all its effects anyway


KEPT = {
    "it waits for others": STEP.replace("f32[8,8], f32[8,8]", "f32[8,8], f32[8,8] after db"),
    "it is on another device": STEP.replace("f32[8,8], f32[8,8]", "f32[8,8], f32[8,8] @/cpu:0"),
    "it runs in a loop": STEP.replace("f32[8,8], f32[8,8]", "f32[8,8], f32[8,8] frame /loop"),
    "it hands on handles": STEP.replace("(dv, dw) : f32[8,8], f32[8,8]", "(dv, w) : f32[8,8], "
                                        "resource[]").replace("both:1", "dw"),
    "it may be dead": STEP.replace("dw = MatMul(x, da) : f32[8,8]",
                                   "p = Placeholder() : bool[]\n"
                                   "s = Switch(da, p) : f32[64,8], f32[64,8]\n"
                                   "dw = MatMul(x, s:1) : f32[8,8]"),
}  # fmt: skip


@pytest.mark.parametrize("why", KEPT)
def test_it_is_left_whole_where(why):
    graph, made = split(KEPT[why])
    assert not made
    assert graph.uses(graph.op(text.op_named(graph, "both")).outputs[0])


def test_with_one_input_there_is_nothing_to_take_apart():
    _, made = split(STEP.replace("both:1", "dw").replace("(dv, dw) : f32[8,8], f32[8,8]",
                                                         "(dv) : f32[8,8]"))  # fmt: skip
    assert not made
