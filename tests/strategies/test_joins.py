"""Concatenations that the host does, where they alone hold more than anything else."""

from __future__ import annotations

import pytest

from tflms.graph import erase, order, text
from tflms.graph.verify import verify
from tflms.planning import cost
from tflms.planning.floor import floor
from tflms.planning.simulate import simulate
from tflms.rewriting.engine import Engine
from tflms.strategies import joins

STEP = """
w = VarHandleOp() : resource[]
x = Placeholder() : f32[1024]
axis = Const() : i32[]
skip = Relu(x) : f32[1024]
small = Tanh(x) : f32[512]
up = Tanh(small) : f32[1024]
cat = ConcatV2(skip, up, axis) : f32[2048]
y = Mul(cat, cat) : f32[512]
loss = Sum(y) : f32[]
dy = TanhGrad(y, y) : f32[512]
dcat = Mul(dy, cat) : f32[512]
dskip = ReluGrad(dcat, dy) : f32[512]
update = AssignSubVariableOp(w, dskip)
"""


def parsed(step=STEP):
    graph = text.parse(step.strip())
    phases = order.phases(graph, loss=[text.value_named(graph, "loss")],
                          targets=[text.op_named(graph, "update")])  # fmt: skip
    line = [op for op in order.topological(graph) if phases.step[op]]
    return graph, phases, line


def found(graph, phases, line, stays=()):
    weights = cost.sizes(graph)
    costs = cost.static_costs(graph, weights)
    leaves = {v for op in graph.ops() for v in op.outputs} - set(stays)
    return joins.candidates(graph, phases, weights, costs, line, leaves)


def lowest(graph, running):
    weights = cost.sizes(graph)
    line = [op for op in order.topological(graph) if op in running]
    return floor(graph, weights, cost.static_costs(graph, weights), line, 0).nbytes


def test_the_device_holds_the_result_alone_and_erasure_gives_the_graph_back():
    graph, phases, line = parsed()
    before, running = erase.edges(graph), set(line)
    assert found(graph, phases, line) == [text.op_named(graph, "cat")]
    assert lowest(graph, running) == 4 * 4096  # skip, up and both together
    (one,) = joins.run(Engine(graph, phases), found(graph, phases, line), line)
    verify(graph)
    erase.check(graph, before)
    running |= {op.id for op in graph.ops() if op.joins_step}
    running -= order.replaced(graph)
    assert lowest(graph, running) == 4096 * 5 // 2  # both together, and what is made of it
    assert [tuple(graph.op(use.op).name for use in uses) for _, uses in one.groups] == [
        ("y", "y"), ("dcat",),
    ]  # fmt: skip
    timeline = simulate(graph, cost.sizes(graph), running)
    assert timeline.moved_bytes == 2 * 4096  # the parts
    assert timeline.host_peak_bytes >= 4 * 4096  # these beside the whole


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("cat = ConcatV2(skip, up, axis)", "cat = AddN(skip, up, axis)"), "it computes"),
        (("y = Mul(cat, cat)", "y = Mul(cat, cat) after cat"), "something waits for it"),
        (("up = Tanh(small)", "up = ReadVariableOp(w)"), "a part is a variable"),
        (("y = Mul(cat, cat) : f32[512]", "y = Mul(cat, cat) : f32[3072]"), "another holds more"),
    ],
)
def test_what_the_host_may_or_need_not_do_stays_on_the_device(change, why):
    step = STEP.replace(*change)
    assert step != STEP
    assert found(*parsed(step)) == [], why


@pytest.mark.parametrize("name", ["up", "cat"])
def test_what_may_not_leave_the_device_is_not_put_together_elsewhere(name):
    graph, phases, line = parsed()
    assert found(graph, phases, line, [text.value_named(graph, name)]) == []


def test_what_the_step_is_run_for_stays_on_the_device():
    graph = text.parse(STEP.strip())
    targets = [text.op_named(graph, name) for name in ("update", "cat")]
    phases = order.phases(graph, loss=[text.value_named(graph, "loss")], targets=targets)
    line = [op for op in order.topological(graph) if phases.step[op]]
    assert found(graph, phases, line) == []
