"""The verifier finds each broken invariant and shows where it is.

The gate for edits does not let a graph break, so the graphs are broken behind its back.
"""

from __future__ import annotations

import itertools

import pytest

from tflms.errors import InvariantError
from tflms.graph import text
from tflms.graph.ir import Use
from tflms.graph.verify import verify

SOUND = """
x = Placeholder() : f32[8]
v = Relu(x) : f32[8]
y = Exp(v) : f32[8]
r = RandomUniform(x) : f32[8] stateful
w = VarHandleOp() : resource[] stateful
g = ReluGrad(y, back) : f32[8]
out = Identity(v) : f32[8] @/cpu:0 role swap_out
back = Identity(out) : f32[8] @/cpu:0 after y role swap_in
again = Exp(v) : f32[8] after g role clone origin y
"""


@pytest.fixture
def graph():
    found = text.parse(SOUND)
    verify(found)
    return found


def op(graph, name):
    return graph.op(text.op_named(graph, name))


def value(graph, name):
    return graph.value(text.value_named(graph, name))


def fails(graph, invariant, culprit):
    with pytest.raises(InvariantError) as caught:
        verify(graph)
    message = str(caught.value)
    assert f"({invariant})" in message
    assert message.startswith(repr(culprit))
    marked = [line for line in message.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert f"{culprit} = " in marked[0]


def test_i1_two_operations_with_one_name(graph):
    op(graph, "y").name = "v"
    fails(graph, "I1", "v")


def test_i1_a_value_of_somebody_else(graph):
    op(graph, "y").outputs[0] = op(graph, "v").outputs[0]
    fails(graph, "I1", "y")


def test_i2_a_use_that_its_operation_knows_nothing_of(graph):
    value(graph, "x").uses.append(Use(op(graph, "y").id, 0))
    fails(graph, "I2", "x")


def test_i2_an_input_that_its_producer_knows_nothing_of(graph):
    value(graph, "v").uses = [u for u in value(graph, "v").uses if u.op != op(graph, "y").id]
    fails(graph, "I2", "y")


def test_i2_a_control_edge_that_only_one_end_knows_of(graph):
    op(graph, "g").controls.append(op(graph, "v").id)
    fails(graph, "I2", "g")


def test_i3_a_cycle_is_shown_in_full(graph):
    graph.add_control(op(graph, "v").id, op(graph, "g").id)
    with pytest.raises(InvariantError) as caught:
        verify(graph)
    message = str(caught.value)
    assert "close a cycle" in message
    names = message.partition(": ")[2].replace("'", "").split(" -> ")
    assert names[0] == names[-1]
    assert {"v", "g"} <= set(names)
    for before, after in itertools.pairwise(names):
        assert op(graph, before).id in graph.predecessors(op(graph, after).id)


def test_i4_a_copy_of_another_shape(graph):
    value(graph, "back").shape = (4,)
    fails(graph, "I4", "back")


def test_i4_a_copy_of_another_type(graph):
    value(graph, "out").dtype = "f16"
    fails(graph, "I4", "out")


def test_i4_a_copy_of_a_handle():
    graph = text.parse(
        "w = VarHandleOp() : resource[] stateful\nc = Identity(w) : resource[] role swap_out"
    )
    fails(graph, "I4", "c")


def test_i5_a_user_operation_that_is_gone(graph):
    node = op(graph, "r")
    node.role = "identity"  # the gate lets go of inserted operations only
    graph.drop(node.id)
    with pytest.raises(InvariantError, match=f"user's operation {node.id} is gone \\(I5\\)"):
        verify(graph)


@pytest.mark.parametrize("variable", ["VariableV2() : f32*[8]", "VarHandleOp() : resource[]"])
def test_i6_a_clone_that_reads_a_variable(variable):
    graph = text.parse(
        f"""
        w = {variable} stateful
        r = Identity(w) : f32[8]
        again = Identity(w) : f32[8] role clone origin r
        """
    )
    fails(graph, "I6", "again")


def test_i7_a_clone_of_a_random_operation():
    graph = text.parse(
        """
        x = Placeholder() : f32[8]
        r = RandomUniform(x) : f32[8]
        again = RandomUniform(x) : f32[8] role clone origin r
        """
    )
    fails(graph, "I7", "again")


def test_i7_a_clone_of_a_stateful_operation():
    graph = text.parse(
        """
        x = Placeholder() : f32[8]
        r = Exp(x) : f32[8] stateful
        again = Exp(x) : f32[8] stateful role clone origin r
        """
    )
    fails(graph, "I7", "again")


def test_i7_a_clone_of_an_unknown_operation():
    graph = text.parse(
        """
        x = Placeholder() : f32[8]
        r = TheirKernel(x) : f32[8]
        again = TheirKernel(x) : f32[8] role clone origin r
        """
    )
    fails(graph, "I7", "again")


def test_i8_a_copy_in_another_loop_frame(graph):
    op(graph, "out").frame = "/loop"
    fails(graph, "I8", "out")


def test_i8_a_clone_in_another_loop_frame(graph):
    op(graph, "again").frame = "/loop"
    fails(graph, "I8", "again")


def test_i8_a_copy_that_is_read_in_a_loop(graph):
    op(graph, "g").frame = "/loop"
    fails(graph, "I8", "back")
