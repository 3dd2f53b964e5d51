"""The graph, its gate for edits, and that everything can be taken back."""

from __future__ import annotations

import pytest

from tflms.errors import InvariantError
from tflms.graph import text
from tflms.graph.ir import Use

SOURCE = """
x = Placeholder() : f32[?,8]
v = Relu(x) : f32[?,8]
three = Split(v) : f32[?,4], i32[2], f32[?,2] after x
y = Exp(v) : f32[?,8]
g = ReluGrad(y, v) : f32[?,8]
w = VarHandleOp() : resource[] stateful
u = AssignSubVariableOp(w, g) stateful
"""


def links(graph):
    """Everything that an edit may touch, taken down without the graph's own queries."""
    return {
        op.name: (
            op.type,
            tuple(op.inputs),
            tuple(op.controls),
            tuple(sorted(graph.control_users(op.id))),
            tuple(tuple(sorted(graph.value(v).uses)) for v in op.outputs),
        )
        for op in graph.ops()
    }


def value(graph, name):
    return text.value_named(graph, name)


def op(graph, name):
    return text.op_named(graph, name)


def copy_of(graph, name, role="identity"):
    source = graph.value(value(graph, name))
    return graph.add(
        f"copy_of_{name}",
        "Identity",
        inputs=[source.id],
        outputs=[(source.dtype, source.shape)],
        role=role,
    )


@pytest.fixture
def graph():
    return text.parse(SOURCE)


def test_values_are_found_by_operation_and_slot(graph):
    assert graph.find_value("three") == graph.op(op(graph, "three")).outputs[0]
    assert graph.find_value("three:2") == graph.op(op(graph, "three")).outputs[2]
    assert graph.value_name(graph.find_value("three:2")) == "three:2"
    assert graph.find_value("three:3") is None
    assert graph.find_value("nobody") is None
    assert graph.find_value("nobody:1") is None


def test_bytes_count_unknown_leading_dimensions_as_asked(graph):
    v = graph.value(value(graph, "v"))
    assert v.nbytes() == 32
    assert v.nbytes(unknown=5) == 160
    assert graph.value(value(graph, "w")).nbytes() is None
    inner = text.parse("a = Relu() : f32[4,?]\nb = Relu() : f16[...]\nc = Relu() : f64[]")
    assert inner.value(value(inner, "a")).nbytes() is None
    assert inner.value(value(inner, "b")).nbytes() is None
    assert inner.value(value(inner, "c")).nbytes() == 8


def test_every_edit_is_taken_back_by_rollback(graph):
    before, shown = links(graph), text.dump(graph)
    copy = copy_of(graph, "v")
    graph.rewire(Use(op(graph, "g"), 1), copy.outputs[0])
    graph.add_control(copy.id, op(graph, "y"))
    graph.add_control(op(graph, "g"), op(graph, "x"))
    graph.remove_control(copy.id, op(graph, "y"))
    assert links(graph) != before
    graph.rollback(0)
    assert links(graph) == before
    assert text.dump(graph) == shown


def test_rollback_to_a_mark_keeps_what_came_before_it(graph):
    copy = copy_of(graph, "v")
    mark, before = len(graph.journal), links(graph)
    graph.rewire(Use(op(graph, "g"), 1), copy.outputs[0])
    graph.rewire(Use(op(graph, "g"), 1), value(graph, "v"))
    graph.drop(copy.id)
    assert not graph.has(copy.id)
    assert graph.find("copy_of_v") is None
    graph.rollback(mark)
    assert links(graph) == before
    assert graph.op(copy.id) is copy


def test_a_dropped_name_may_be_used_again(graph):
    graph.drop(copy_of(graph, "v").id)
    again = copy_of(graph, "v")
    assert graph.find("copy_of_v") == again.id
    graph.rollback(0)
    assert graph.find("copy_of_v") is None


def test_the_version_grows_with_every_edit_and_with_taking_it_back(graph):
    seen = [graph.version]
    copy_of(graph, "v")
    seen.append(graph.version)
    graph.rollback(0)
    seen.append(graph.version)
    assert seen == sorted(set(seen))


def test_a_name_is_given_once(graph):
    with pytest.raises(InvariantError, match="called 'v' already"):
        graph.add("v", "Relu")


def test_a_slot_keeps_its_type(graph):
    with pytest.raises(InvariantError, match="slot 1 of 'g' reads a f32, which a i32"):
        graph.rewire(Use(op(graph, "g"), 1), value(graph, "three:1"))


@pytest.mark.parametrize("kind", ["resource", "variant", "string", "f32*"])
def test_handles_and_references_are_not_rewired(kind):
    graph = text.parse(f"a = A() : {kind}[]\nb = A() : {kind}[]\nc = Read(a) : f32[2]")
    with pytest.raises(InvariantError, match="cannot replace"):
        graph.rewire(Use(op(graph, "c"), 0), value(graph, "b"))


def test_only_inserted_operations_may_go(graph):
    with pytest.raises(InvariantError, match="'u' is not ours to remove"):
        graph.drop(op(graph, "u"))


def test_what_is_in_use_may_not_go(graph):
    copy = copy_of(graph, "v")
    graph.rewire(Use(op(graph, "g"), 1), copy.outputs[0])
    with pytest.raises(InvariantError, match="still in use"):
        graph.drop(copy.id)


def test_control_edges_of_the_user_may_not_go(graph):
    with pytest.raises(InvariantError, match="'three' has no control edge"):
        graph.remove_control(op(graph, "three"), op(graph, "x"))


def test_a_second_control_edge_of_the_same_kind_is_not_added(graph):
    graph.add_control(op(graph, "three"), op(graph, "x"))
    assert graph.journal == []


def test_an_operation_that_was_dropped_is_not_handed_out(graph):
    copy = copy_of(graph, "v")
    graph.drop(copy.id)
    with pytest.raises(InvariantError, match=f"operation {copy.id} is not in the graph"):
        graph.op(copy.id)
    with pytest.raises(InvariantError):
        graph.op(-1)


def test_the_edge_that_closes_a_loop_orders_nothing():
    graph = text.parse(
        """
        x = Placeholder() : f32[2]
        e = Enter(x) : f32[2] entering loop
        m = Merge(e, n) : f32[2], i32[] frame /loop
        t = Tanh(m) : f32[2] frame /loop
        n = NextIteration(t) : f32[2] frame /loop
        """
    )
    merge, again = op(graph, "m"), op(graph, "n")
    assert graph.predecessors(merge) == [op(graph, "e")]
    assert graph.successors(again) == []
    assert not graph.orders(again, merge)


def test_one_value_in_several_slots_is_one_predecessor_and_several_uses():
    graph = text.parse("x = Placeholder() : f32[2]\ny = Mul(x, x) : f32[2] after x")
    y = op(graph, "y")
    assert graph.predecessors(y) == [op(graph, "x")]
    assert graph.successors(op(graph, "x")) == [y]
    assert graph.uses(value(graph, "x")) == (Use(y, 0), Use(y, 1))
