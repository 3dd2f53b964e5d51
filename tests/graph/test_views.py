"""Views and variable semantics on graphs written as text."""

import networkx as nx
import numpy as np

from tflms.graph import order, text, variables, views

STEP = """
w = VarHandleOp() : resource[]
x = Placeholder() : f32[8,8]
r = ReadVariableOp(w) : f32[8,8]
y = MatMul(x, r) : f32[8,8]
loss = Sum(y) : f32[]
g = MatMul(x, y) : f32[8,8]
up = AssignSubVariableOp(w, g) stateful
"""


def test_an_update_edge_leads_from_the_writer_to_the_owner_and_orders_nothing():
    graph = text.parse(STEP)
    (edge,) = variables.updates(graph)
    assert (graph.op(edge.source).name, graph.op(edge.target).name) == ("up", "w")
    place = {op: i for i, op in enumerate(order.topological(graph))}
    assert place[edge.target] < place[edge.source]


def test_readers_and_writers_of_a_variable_are_found_through_copies_of_its_handle():
    graph = text.parse(STEP + "h = Identity(w) : resource[]\nr2 = ReadVariableOp(h) : f32[8,8]\n")
    readers, writers = variables.accesses(graph)[graph.find("w")]
    assert [graph.op(op).name for op in readers] == ["r", "h", "r2"]
    assert [graph.op(op).name for op in writers] == ["up"]


def test_two_variables_that_update_each_other_are_no_cycle():
    graph = text.parse(
        """
        a = VarHandleOp() : resource[]
        b = VarHandleOp() : resource[]
        ra = ReadVariableOp(a) : f32[8]
        rb = ReadVariableOp(b) : f32[8]
        ua = AssignVariableOp(a, rb) stateful
        ub = AssignVariableOp(b, ra) stateful
        """
    )
    assert len(order.topological(graph)) == 6
    view = views.to_networkx(graph)
    assert not nx.is_directed_acyclic_graph(view)  # the update edges close the training loop
    updates = [(u, v, k) for u, v, k, a in view.edges(keys=True, data="action") if a == "update"]
    assert len(updates) == 2
    view.remove_edges_from(updates)
    assert nx.is_directed_acyclic_graph(view)


def test_networkx_and_numpy_agree_on_reachability():
    graph = text.parse(STEP)
    snapshot = views.arrays(graph)
    pairs = {
        (op, int(target))
        for op in range(graph.size)
        for target in snapshot.targets[snapshot.starts[op] : snapshot.starts[op + 1]]
    }
    view = views.to_networkx(graph)
    expected = {(u, v) for u, v, action in view.edges(data="action") if action != "update"}
    assert pairs == expected
    assert snapshot.nbytes[graph.find_value("y")] == 8 * 8 * 4
    assert snapshot.nbytes[graph.find_value("w")] == 0


def test_the_snapshot_is_made_again_after_an_edit():
    graph = text.parse(STEP)
    first = views.arrays(graph)
    assert views.arrays(graph) is first
    graph.add_control(graph.find("g"), graph.find("loss"))
    second = views.arrays(graph)
    assert second is not first
    assert len(second.targets) == len(first.targets) + 1
    assert np.array_equal(first.producer, second.producer)
