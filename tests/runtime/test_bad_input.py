"""Wrong calls: each is told what is wrong, where, and what to do; the graph stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tflms
from tests.runtime.graphs import SETTINGS, chain, run, serialized, v1
from tflms import TflmsError
from tflms.errors import ConfigError, GraphError, InfeasibleError


@pytest.fixture(scope="module")
def step():
    """A step that no call of these tests may change."""
    return chain()


def refused(kind, message, graph, config=SETTINGS, **arguments):
    before = serialized(graph)
    with pytest.raises(kind, match=message) as caught:
        tflms.rewrite(graph, config, **arguments)
    assert isinstance(caught.value, TflmsError)
    assert serialized(graph) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_tensor": 3}, r"unknown config key 'n_tensor'; did you mean 'n_tensors'\? \(known: "),
        ({"strateggy": "auto"}, r"'strateggy'; did you mean 'strategy'"),
        ({"zzz": 1}, r"unknown config key 'zzz' \(known: strategy, "),
        ({7: 1}, "unknown config key 7"),
        ({"strategy": "chain_rul"}, r"unknown strategy 'chain_rul'; did you mean 'chain_rule'"),
        ({"strategy": 3}, "unknown strategy 3"),
        ({"n_tensors": "5"}, "n_tensors is '5'; write a whole number"),
        ({"n_tensors": 1.5}, "n_tensors is 1.5; write a whole number"),
        ({"n_tensors": True}, "n_tensors is True; write a whole number"),
        ({"n_tensors": -2}, "n_tensors is -2; the least allowed is -1"),
        ({"lb": -1}, "lb is -1; the least allowed is 0"),
        ({"lb": 0}, "lb is 0; an anchor lies at least 1 level before"),
        ({"ub": -5}, "ub is -5; the least allowed is 0"),
        ({"lb": 7, "ub": 3}, "lb is 7 and ub is 3; lb must not be larger than ub"),
        ({"fuse_swapins": 1}, "fuse_swapins is 1; write True or False"),
        ({"swap_branches": "yes"}, "swap_branches is 'yes'; write True or False"),
        ({"branch_threshold": -1}, "branch_threshold is -1; the least allowed is 0"),
        ({"fuse_distance": -1}, "fuse_distance is -1; the least allowed is 0"),
        ({"min_swap_bytes": -1}, "min_swap_bytes is -1; a size is not negative"),
        ({"min_swap_bytes": 1.5}, "min_swap_bytes is 1.5; write bytes"),
        ({"min_swap_bytes": "64XB"}, "'64XB' is no size"),
        ({"host_memory_limit": -8}, "host_memory_limit is -8; a size is not negative"),
        ({"memory_limit": 0}, "memory_limit is 0; write the bytes"),
        ({"memory_limit": 1.5}, r"memory_limit is 1.5; a fraction .* lies in \(0, 1\]"),
        ({"memory_limit": -0.5}, "memory_limit is -0.5; a fraction"),
        ({"memory_limit": float("nan")}, "memory_limit is nan; a fraction"),
        ({"memory_limit": "-1GiB"}, "'-1GiB' is no size"),
        ({"batch_size": 0}, "batch_size is 0; the least allowed is 1"),
        ({"incl_scopes": "conv1"}, "incl_scopes is 'conv1'; write a list of names"),
        ({"excl_types": [3]}, "excl_types is 3; write a text"),
        ({"device": 0}, "device is 0; write a text"),
        ({"host_device": ""}, "host_device is ''; write a text"),
        ({"incl_scopes": ["nowhere"]}, "no operation lies in the scope 'nowhere'"),
        ({"incl_types": ["Tahn"]}, "no operation of type 'Tahn'"),
        ({"device": "/device:TPU:0"}, r"device is '/device:TPU:0' .* this process has CPU"),
        ({"device": "gpu?"}, "device is 'gpu\\?'"),
        ({"host_device": "/device:WARP:1"}, r"host_device is '/device:WARP:1'"),
        (["lb", 3], "a config is a tflms.Config or a dict, not list"),
        ("chain_rule", "a config is a tflms.Config or a dict, not str"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(step, config, message):
    graph, _, loss, train = step
    refused(ConfigError, message, graph, config, loss=loss, fetches=[train])


def test_a_loss_from_another_graph(step):
    graph, _, _, train = step
    _, _, other, _ = chain()
    refused(GraphError, "does not belong to the graph", graph, loss=other, fetches=[train])


def test_a_fetch_from_another_graph(step):
    graph, _, loss, _ = step
    _, _, _, other = chain()
    refused(GraphError, "does not belong to the graph", graph, loss=loss, fetches=[other])


def test_a_name_that_is_not_there(step):
    graph, _, loss, _ = step
    refused(GraphError, "there is no 'trian' in the graph", graph, loss=loss, fetches=["trian"])
    refused(GraphError, "there is no 'los:0' in the graph", graph, loss="los:0", fetches=["train"])


@pytest.mark.parametrize("loss", [3, [None], object()])
def test_a_loss_that_is_no_tensor(step, loss):
    graph, _, _, train = step
    refused(GraphError, "does not belong to the graph", graph, loss=loss, fetches=[train])


def test_an_operation_for_a_loss(step):
    graph, _, loss, train = step
    refused(GraphError, "pass the tensor that the gradients", graph, loss=loss.op, fetches=[train])


def test_names_do_for_loss_and_fetches():
    graph, x, loss, train = chain()
    report = tflms.rewrite(graph, SETTINGS, loss="loss:0", fetches="train")
    assert report.changed
    assert run(graph, x, loss, train)[0] == run(*chain())[0]


def test_a_graph_without_gradients():
    graph, _, loss, _ = chain(train=False)
    refused(GraphError, "no gradient ops reach back", graph, loss=loss, fetches=[loss])
    refused(GraphError, "no gradient ops reach back", graph)


def test_an_empty_graph():
    refused(GraphError, "the graph is empty; build the training graph first", tf.Graph())


@pytest.mark.parametrize("graph", [None, "graph", tf.constant(1.0)])
def test_what_is_no_graph(graph):
    with pytest.raises(GraphError, match=r"expected a tf\.Graph"):
        tflms.rewrite(graph, SETTINGS)


def test_no_tensors_at_all_is_nothing_and_is_said(step):
    graph, _, loss, train = step
    before = serialized(graph)
    report = tflms.rewrite(graph, {**SETTINGS, "n_tensors": 0}, loss=loss, fetches=[train])
    assert serialized(graph) == before
    assert not report.changed
    assert report.swaps == ()
    assert report.notes == ("nothing was changed: n_tensors is 0",)
    assert "nothing was changed" in str(report)


def test_strategy_none_is_nothing_and_is_said(step):
    graph, _, loss, train = step
    before = serialized(graph)
    report = tflms.rewrite(graph, {"strategy": "none"}, loss=loss, fetches=[train])
    assert serialized(graph) == before
    assert report.notes == ("nothing was changed: strategy is 'none'",)
    assert report.predicted_peak_bytes == report.plain_peak_bytes


def test_a_graph_with_nothing_worth_swapping_is_left_alone_and_it_is_said(step):
    graph, _, loss, train = step
    before = serialized(graph)
    config = {"min_swap_bytes": "1GiB", "batch_size": 4}
    report = tflms.rewrite(graph, config, loss=loss, fetches=[train])
    assert serialized(graph) == before
    assert "nothing was changed: no value has a late use" in report.notes[0]


def test_a_plan_over_the_hosts_limit_is_refused(step):
    graph, _, loss, train = step
    config = {**SETTINGS, "host_memory_limit": 100, "batch_size": 64}
    refused(InfeasibleError, "more than host_memory_limit=100; raise it, or lower n_tensors: less",
            graph, config, loss=loss, fetches=[train])  # fmt: skip


def test_two_variables_that_update_each_other_are_no_cycle():
    def build():
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None, 8], "x")
            a = v1.get_variable("a", initializer=np.eye(8, dtype="f") / 2)
            b = v1.get_variable("b", initializer=np.eye(8, dtype="f") / 3)
            h = x
            for w in (a, b, a, b, a, b):
                h = tf.tanh(tf.matmul(h, w))
            loss = tf.reduce_mean(h**2)
            da, db = tf.gradients(loss, [a, b])
            old_a, old_b = a.read_value(), b.read_value()
            with tf.control_dependencies([old_a, old_b, da, db]):
                train = tf.group(a.assign(old_b - 0.1 * da), b.assign(old_a - 0.1 * db))
        return graph, x, loss, train

    graph, x, loss, train = build()
    report = tflms.rewrite(graph, SETTINGS, loss=loss, fetches=[train, loss])
    assert report.changed
    got, plain = run(graph, x, loss, train), run(*build())
    assert got[0] == plain[0]
    np.testing.assert_array_equal(np.array(got[1]), np.array(plain[1]))


def test_a_real_cycle_is_found_before_tensorflow_sees_it():
    graph, _, loss, train = chain()
    first = graph.get_operation_by_name("net/layer1/act")
    last = graph.get_operation_by_name("net/layer4/act")
    first._add_control_input(last)  # TensorFlow takes it, and would fail at the first run
    refused(TflmsError, "close a cycle", graph, loss=loss, fetches=[train])
