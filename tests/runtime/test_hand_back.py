"""The graph is edited in place: what the user holds stays as it was, and errors change nothing."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import tensorflow as tf

import tflms
from tests.runtime.graphs import SETTINGS, chain, run, serialized, v1
from tflms.errors import GraphError, HandBackError


def facts(graph):
    """All that is said of each operation but for its edges."""
    return {
        op.name: (
            op.type,
            op.device,
            tuple(op.colocation_groups()),
            tuple((t.name, t.dtype, str(t.shape)) for t in op.outputs),
            {key: value.SerializeToString(deterministic=True)
             for key, value in op.node_def.attr.items()},
        )
        for op in graph.get_operations()
    }  # fmt: skip


def collections(graph):
    return {key: list(graph.get_collection(key)) for key in graph.get_all_collection_keys()}


@pytest.fixture
def rewritten():
    graph, x, loss, train = chain()
    with graph.as_default():
        v1.add_to_collection("mine", loss)
        v1.add_to_collection("mine", {"a": 1})
        v1.summary.scalar("loss", loss)
        with graph.device("/device:CPU:0"), graph.colocate_with(x):
            tf.identity(loss, "placed")
    before = facts(graph), collections(graph), graph.get_operations()
    report = tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train, loss])
    return graph, x, loss, train, before, report


def test_the_same_numbers_come_out(rewritten):
    graph, x, loss, train, _, report = rewritten
    assert {f"net/layer{i}/act" for i in range(5)} <= {s.value for s in report.swaps}
    losses, variables = run(graph, x, loss, train)
    plain_losses, plain_variables = run(*chain())
    assert losses == plain_losses
    for got, expected in zip(variables, plain_variables, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_every_operation_keeps_what_is_said_of_it(rewritten):
    graph, *_, (before, _, _), _ = rewritten
    after = facts(graph)
    assert {name: after[name] for name in before} == before
    assert all("--tflms/" in name for name in after if name not in before)


def test_handles_stay_the_very_same_objects(rewritten):
    graph, x, loss, train, (_, _, operations), _ = rewritten
    assert [graph.get_operation_by_name(op.name) is op for op in operations] == [True] * len(
        operations
    )
    assert graph.get_tensor_by_name("loss:0") is loss
    assert graph.get_operation_by_name("train") is train
    assert graph.get_tensor_by_name("x:0") is x


def test_collections_hold_what_they_held(rewritten):
    graph, *_, (_, before, _), _ = rewritten
    after = collections(graph)
    assert after.keys() == before.keys()
    for key, items in before.items():
        assert len(after[key]) == len(items)
        assert all(a is b for a, b in zip(after[key], items, strict=True))


def test_inserted_operations_are_on_the_host_and_protected(rewritten):
    graph, *_, report = rewritten
    inserted = [op for op in graph.get_operations() if "--tflms/" in op.name]
    assert len(inserted) == report.inserted_ops
    for op in inserted:
        assert op.type == "Identity"
        assert op.device == ("" if op.name.endswith("identity") else "/cpu:0")
        assert op.get_attr("_grappler_do_not_remove") is True
        assert op.outputs[0].shape.as_list() == op.inputs[0].shape.as_list()
        assert op.colocation_groups() == [b"loc:@" + op.name.encode()]


def test_the_edges_are_those_that_the_report_tells_of(rewritten):
    graph, *_, report = rewritten
    for swap in report.swaps:
        value = graph.get_tensor_by_name(swap.value + ":0")
        out = graph.get_operation_by_name(swap.swap_out)
        assert out.inputs[0] is value
        readers = set()
        for name, anchor in zip(swap.swap_ins, swap.anchors, strict=True):
            back = graph.get_operation_by_name(name)
            assert back.inputs[0] is out.outputs[0]
            assert [op.name for op in back.control_inputs] == [anchor]
            readers |= {op.name for op in back.outputs[0].consumers()}
        assert readers == set(swap.uses)


def test_the_graph_can_be_exported_imported_and_grown(rewritten):
    graph, x, loss, train, _, _ = rewritten
    with graph.as_default():
        meta = v1.train.export_meta_graph()
    with tf.Graph().as_default() as copy:
        v1.train.import_meta_graph(meta)
    again = tuple(copy.as_graph_element(t.name) for t in (x, loss, train))
    assert run(copy, *again)[0] == run(graph, x, loss, train)[0]
    with graph.as_default():
        more = loss * 2.0
        gradient = tf.gradients(more, x)[0]  # backward through the graph as it is now
    assert run(graph, x, gradient, train)[0][0].shape == (5, 8)


def test_two_rewrites_of_equal_graphs_are_byte_for_byte_equal():
    found = set()
    for _ in range(2):
        graph, _, loss, train = chain()
        tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
        found.add(serialized(graph))
    assert len(found) == 1


def test_scopes_around_the_call_have_no_influence():
    graph, _, loss, train = chain()
    plain, _, plain_loss, plain_train = chain()
    tflms.rewrite(plain, SETTINGS, loss=plain_loss, fetches=[plain_train])
    with (
        graph.as_default(),
        graph.name_scope("mine"),
        graph.device("/device:CPU:1"),
        graph.control_dependencies([train]),
        graph.colocate_with(loss),
        graph._attr_scope({"_mine": tf.compat.v1.AttrValue(b=True)}),
    ):
        tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
    inserted = [op for op in graph.get_operations() if "--tflms/" in op.name]
    assert inserted
    for op in inserted:
        assert op.device == ("" if op.name.endswith("identity") else "/cpu:0")
        assert train not in op.control_inputs
    assert {op.name for op in inserted} == {
        op.name for op in plain.get_operations() if "--tflms/" in op.name
    }


def test_reference_variables_are_handled_too():
    graph, x, loss, train = chain(resource=False)
    assert any(op.type == "VariableV2" for op in graph.get_operations())
    report = tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
    assert {f"net/layer{i}/act" for i in range(5)} <= {s.value for s in report.swaps}
    assert run(graph, x, loss, train)[0] == run(*chain(resource=False))[0]


@pytest.mark.parametrize("fetched", ["init", "loss", "train"])
def test_a_graph_that_an_open_session_has_run_is_refused_and_unchanged(fetched):
    graph, x, loss, train = chain()
    with graph.as_default():
        init = v1.global_variables_initializer()
    before = serialized(graph)
    with v1.Session(graph=graph) as session:
        session.run(init)
        if fetched != "init":
            session.run({"loss": loss, "train": train}[fetched], {x: np.ones([2, 8], "f")})
        with pytest.raises(HandBackError, match="open session has run this graph already"):
            tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
        assert serialized(graph) == before
        session.run(train, {x: np.ones([2, 8], "f")})


def test_a_session_that_has_run_nothing_or_is_closed_does_no_harm():
    graph, x, loss, train = chain()
    with graph.as_default():
        init = v1.global_variables_initializer()
    with v1.Session(graph=graph) as closed:
        closed.run(init)
    with v1.Session(graph=graph) as fresh:
        report = tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
        assert report.changed
        fresh.run(init)
        metadata = v1.RunMetadata()
        options = v1.RunOptions(output_partition_graphs=True)
        fresh.run(train, {x: np.ones([2, 8], "f")}, options=options, run_metadata=metadata)
    names = {node.name for part in metadata.partition_graphs for node in part.node}
    assert {s.swap_out for s in report.swaps} <= names


def test_sessions_of_other_graphs_do_no_harm():
    other, x, _, train = chain()
    graph, _, loss, mine = chain()
    with other.as_default(), v1.Session(graph=other) as session:
        session.run(v1.global_variables_initializer())
        session.run(train, {x: np.ones([2, 8], "f")})
        assert tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[mine]).changed


def test_a_monitored_session_is_refused_as_its_graph_is_finalized():
    graph, x, loss, train = chain()
    with graph.as_default(), v1.train.MonitoredSession() as session:
        session.run(train, {x: np.ones([2, 8], "f")})
        before = serialized(graph)
        with pytest.raises(HandBackError, match="the graph is finalized"):
            tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
    assert serialized(graph) == before


def test_a_finalized_graph_is_refused_and_unchanged():
    graph, _, loss, train = chain()
    graph.finalize()
    before = serialized(graph)
    with pytest.raises(HandBackError, match=r"the graph is finalized.*rewrite it before"):
        tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
    assert serialized(graph) == before


def test_a_second_rewrite_is_refused_and_changes_nothing():
    graph, x, loss, train = chain()
    tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train])
    before = serialized(graph)
    with pytest.raises(GraphError, match=r"rewritten already.*build it anew"):
        tflms.rewrite(graph, {**SETTINGS, "lb": 3}, loss=loss, fetches=[train])
    assert serialized(graph) == before
    assert run(graph, x, loss, train)[0] == run(*chain())[0]


def test_when_tensorflow_refuses_an_edit_the_users_edges_come_back():
    graph, x, loss, train = chain()
    tflms_name = "net/layer0/act--tflms/swap_out"
    edges = {
        op.name: ([t.name for t in op.inputs], [c.name for c in op.control_inputs])
        for op in graph.get_operations()
    }
    from tflms.config import Config
    from tflms.runtime import read as reading
    from tflms.runtime import write
    from tflms.runtime.job import start

    job = start(graph, Config.of(SETTINGS), loss=loss, fetches=[train])
    ir = job.graph
    value = ir.find_value("net/layer0/act")
    copy = ir.add(tflms_name, "Identity", inputs=[value], outputs=[("f32", (None, 8))],
                  device="/cpu:0", role="swap_out")  # fmt: skip
    late = [u for u in ir.uses(value) if ir.op(u.op).type == "TanhGrad"]
    ir.rewire(late[0], copy.outputs[0])
    # A control edge that the graph cannot take: TensorFlow itself refuses it while replaying.
    broken = ir.add("no such name!", "Identity", inputs=[value], outputs=[("f32", (None, 8))],
                    role="identity")  # fmt: skip
    assert broken.role
    with pytest.raises(
        HandBackError, match=r"refused an edit.*edges of the graph are as they were"
    ):
        write.hand_back(job.read, job.phases.step)
    after = {
        op.name: ([t.name for t in op.inputs], [c.name for c in op.control_inputs])
        for op in graph.get_operations()
    }
    assert {name: after[name] for name in edges} == edges
    assert reading.read(graph)
    assert run(graph, x, loss, train)[0] == run(*chain())[0]


def test_a_report_can_be_kept_without_its_graph(rewritten):
    *_, report = rewritten
    assert pickle.loads(pickle.dumps(report.to_dict())) == report.to_dict()
