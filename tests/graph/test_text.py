"""The text form: read back as written, and told what is wrong with a line."""

from __future__ import annotations

import pytest

from tflms.errors import GraphError
from tflms.graph import text

EVERYTHING = """\
in.put = Placeholder() : f32[?,8]
x->y/a-b = Relu(in.put) : f32[?,8] @/job:worker/task:1/device:GPU:0
split = Split(x->y/a-b) : f32[...], i32[], bool[0] after in.put, later colocated in.put, x->y/a-b
_deep = Mul(split, split:1) : f32[?,8] frame /outer/while
v = VariableV2() : f32*[3] stateful
w = VarHandleOp() : resource[] stateful
enter = Enter(split) : f32[...] entering while
later = NoOp()
copy = Identity(split) : f32[...] @/cpu:0 after later role swap_out
again = Relu(in.put) : f32[?,8] role clone origin x->y/a-b
"""


def test_everything_that_can_be_written_is_read_back():
    graph = text.parse(EVERYTHING)
    assert text.dump(graph) == EVERYTHING
    assert text.dump(text.parse(text.dump(graph))) == EVERYTHING


def test_what_is_read_is_what_was_written():
    graph = text.parse(EVERYTHING)
    split = graph.op(text.op_named(graph, "split"))
    assert [graph.value(v).shape for v in split.outputs] == [None, (), (0,)]
    assert [graph.value(v).dtype for v in split.outputs] == ["f32", "i32", "bool"]
    assert split.controls == [0, text.op_named(graph, "later")]
    assert split.colocation == ("in.put", "x->y/a-b")
    assert graph.op(text.op_named(graph, "_deep")).frame == "/outer/while"
    assert graph.op(text.op_named(graph, "x->y/a-b")).device == "/job:worker/task:1/device:GPU:0"
    assert graph.value(text.value_named(graph, "v")).is_ref
    assert graph.op(text.op_named(graph, "w")).stateful
    again = graph.op(text.op_named(graph, "again"))
    assert (again.role, again.origin) == ("clone", 1)
    assert graph.original_ops == text.op_named(graph, "copy")


def test_comments_and_blank_lines_are_passed_over():
    assert len(text.parse("\n# nothing\n\n  a = NoOp()  \n")) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a NoOp()", "cannot read 'a NoOp\\(\\)'; write `name = Type"),
        ("a = NoOp() nonsense", "cannot read 'nonsense'"),
        ("a = Relu(b) : f32[1]", "no value 'b'"),
        ("a = NoOp() after b", "no operation 'b'"),
        ("a = NoOp()\nb = Relu(a:1) : f32[1]", "no value 'a:1'"),
    ],
)
def test_a_line_that_cannot_be_read_is_shown(source, message):
    with pytest.raises(GraphError, match=message):
        text.parse(source)


def test_an_input_slot_is_named_by_operation_and_number():
    graph = text.parse("x = Placeholder() : f32[1]\ny = Mul(x, x) : f32[1]")
    assert text.use_named(graph, "y[1]") == (1, 1)
    with pytest.raises(GraphError, match="write it as op\\[slot\\]"):
        text.use_named(graph, "y")
    with pytest.raises(GraphError, match="'y' has no input slot 2"):
        text.use_named(graph, "y[2]")


def test_an_excerpt_marks_the_line_that_matters():
    graph = text.parse("\n".join(f"a{i} = NoOp()" for i in range(9)))
    shown = text.excerpt(graph, 4).splitlines()
    assert len(shown) == 5
    assert [line for line in shown if line.startswith(">") and "<- here" in line] == [shown[2]]
    assert "a4 = NoOp()" in shown[2]
