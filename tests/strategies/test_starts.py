"""Variables that a constant starts: each gets a buffer of its own before the step."""

from tflms.graph import erase, order, text
from tflms.graph.verify import verify
from tflms.planning import cost, simulate
from tflms.planning.initial import initial_constants
from tflms.rewriting.engine import Engine
from tflms.strategies import starts

STEP = """
w = VarHandleOp() : resource[]
m = VarHandleOp() : resource[]
x = Placeholder() : f32[4096]
zeros = Const() : f32[4096]
random = RandomUniform(shape) : f32[4096] stateful
shape = Const() : i32[1]
start_w = AssignVariableOp(w, random)
start_m = AssignVariableOp(m, zeros)
read = ReadVariableOp(w) : f32[4096]
y = Mul(x, read) : f32[4096]
loss = Sum(y) : f32[]
g = Mul(y, x) : f32[4096]
update = ResourceApplyMomentum(w, m, g)
"""


def parsed():
    graph = text.parse(STEP.strip())
    for name in ("w", "m"):
        graph.op(text.op_named(graph, name)).attrs["variable_nbytes"] = 4 * 4096
    phases = order.phases(graph, loss=[text.value_named(graph, "loss")],
                          targets=[text.op_named(graph, "update")])  # fmt: skip
    return graph, phases, {op.id for op in graph.ops() if phases.step[op.id]}


def births(graph, step):
    """What the first step allocates for good."""
    weights = cost.sizes(graph)
    replay = simulate.Replay(graph, weights, step, cost.static_costs(graph, weights))
    asked = replay.events([op for op in order.topological(graph) if op in step])
    return [event.nbytes for event in asked.events if event.once], sum(asked.persistent)


def test_what_a_constant_starts_is_copied_and_nothing_else():
    graph, phases, step = parsed()
    before = erase.edges(graph)
    assert starts.run(Engine(graph, phases), step) == 1
    maker = graph.producer(graph.op(text.op_named(graph, "start_m")).inputs[1])
    assert (maker.type, maker.role, maker.joins_step) == ("DeepCopy", "own", False)
    assert graph.op(text.op_named(graph, "start_w")).inputs[1] == text.value_named(graph, "random")
    verify(graph)
    erase.check(graph, before)


def test_a_shared_buffer_is_replaced_amid_the_first_step_and_an_own_one_is_there_before():
    graph, phases, step = parsed()
    shared, persistent = births(graph, step)
    assert shared == [4 * 4096]
    starts.run(Engine(graph, phases), step)
    own, more = births(graph, step)
    assert own == []
    assert more == persistent + 4 * 4096


STARTED = """
w = VarHandleOp() : resource[]
m = VarHandleOp() : resource[] colocated w
n = VarHandleOp() : resource[] colocated w
v = VarHandleOp() : resource[]
values = Const() : f32[4096]
zeros = Const() : f32[4096] colocated w
again = Const() : f32[4096] colocated w
others = Const() : f32[4096] colocated v
start_w = AssignVariableOp(w, values)
start_m = AssignVariableOp(m, zeros)
start_n = AssignVariableOp(n, again)
start_v = AssignVariableOp(v, others)
"""


def test_constants_of_one_shape_count_once_only_where_they_are_equal_and_colocated():
    graph = text.parse(STARTED.strip())
    zeros = text.op_named(graph, "zeros")
    for equal in ("again", "others"):
        graph.op(text.op_named(graph, equal)).attrs["equal_to"] = zeros
    found = initial_constants(graph, cost.sizes(graph), set())
    assert found.nbytes == (4 * 4096,) * 3  # values; zeros and again; others
    assert len(found.sharing) == 4
