"""Gradients that one IdentityN ties together: each goes to its update alone, with equal numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tflms
from tests.function.steps import Net, batch, train
from tests.runtime.graphs import serialized, v1

BATCHES = [batch(256, 64, seed=i) for i in range(3)]


def tied(net, *, fetch=False):
    """A step whose gradients pass through one IdentityN, as those of Keras's optimizers do."""

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net.forward(x) ** 2)
        gradients = tf.raw_ops.IdentityN(input=tape.gradient(loss, net.weights))
        for weight, gradient in zip(net.weights, gradients, strict=True):
            weight.assign_sub(0.5 * gradient)
        return gradients[0] if fetch else loss

    return step


def net():
    return Net(width=64, depth=8)


def ties(graph):
    return [op for op in graph.get_operations() if op.type == "IdentityN"]


def test_a_limit_that_holds_no_two_gradients_is_kept_with_equal_numbers():
    plain, mine = net(), net()
    expected = train(tf.function(tied(plain)), plain, BATCHES)
    step = tflms.function(tied(mine), {"memory_limit": 0.6, "min_swap_bytes": 0})
    assert train(step, mine, BATCHES) == expected
    report = step.report()
    assert report.swaps and report.verify().ok
    (tie,) = ties(step.get_concrete_function(BATCHES[0]).graph)
    assert len(tie.inputs) == 8  # it is there, for whoever asks for it, and nobody does
    assert not any(t.consumers() for t in tie.outputs)


def test_what_the_function_returns_holds_the_tie_and_is_counted():
    steps = [tflms.function(tied(net(), fetch=f), {"memory_limit": 1.0}) for f in (False, True)]
    alone, together = ((step(BATCHES[0]), step.report().plain_peak_bytes)[1] for step in steps)
    assert together >= alone
    plain, mine = net(), net()
    expected = train(tf.function(tied(plain, fetch=True)), plain, BATCHES)
    step = tflms.function(tied(mine, fetch=True), {"memory_limit": 0.8, "min_swap_bytes": 0})
    assert train(step, mine, BATCHES) == expected


def session_graph():
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [256, 64], "x")
        random = np.random.RandomState(0)
        weights = [
            v1.get_variable(f"w{i}", initializer=(random.randn(64, 64) / 8).astype(np.float32))
            for i in range(6)
        ]
        y = x
        for weight in weights:
            y = tf.tanh(y @ weight)
        loss = tf.reduce_mean(y**2, name="loss")
        tie = tf.raw_ops.IdentityN(input=tf.gradients(loss, weights))
        updates = [v1.assign_sub(w, 0.5 * g) for w, g in zip(weights, tie, strict=True)]
        train_op = tf.group(*updates, name="train")
        v1.global_variables_initializer()
    return graph, loss, train_op, tie


def run(graph, loss, train_op, tie, fetches):
    feed = {"x:0": np.asarray(BATCHES[0])}
    with v1.Session(graph=graph) as session:
        session.run("init")
        seen = [session.run(fetches, feed) for _ in range(2)]
        return [np.asarray(v).tobytes() for values in seen for v in values if v is not None]


@pytest.mark.parametrize("strategy", [{"memory_limit": 0.7}, {"strategy": "chain_rule"}])
def test_in_a_session_gradients_can_still_be_fetched_behind_the_tie(strategy):
    plain = session_graph()
    expected = run(*plain, [plain[1], plain[2], *plain[3]])
    graph, loss, train_op, tie = session_graph()
    config = {**strategy, "min_swap_bytes": 0}
    report = tflms.rewrite(graph, config, loss=loss, fetches=[loss, train_op])
    assert report.changed
    assert not any(t.consumers() for t in tie)
    assert run(graph, loss, train_op, tie, [loss, train_op, *tie]) == expected


def test_a_limit_that_nothing_meets_leaves_the_tie_as_it_was():
    graph, loss, train_op, _ = session_graph()
    before = serialized(graph)
    with pytest.raises(tflms.InfeasibleError):
        tflms.rewrite(graph, {"memory_limit": 1000}, loss=loss, fetches=[loss, train_op])
    assert serialized(graph) == before


def test_a_replay_that_tensorflow_refuses_gives_the_readers_their_tie_back(monkeypatch):
    graph, loss, train_op, tie = session_graph()
    readers = {t.name: [c.name for c in t.consumers()] for t in tie}
    monkeypatch.setattr(
        tf.Operation, "_add_control_input", lambda *_: (_ for _ in ()).throw(ValueError("no"))
    )
    with pytest.raises(tflms.HandBackError):
        tflms.rewrite(graph, {"memory_limit": 0.7, "min_swap_bytes": 0}, loss=loss,
                      fetches=[loss, train_op])  # fmt: skip
    assert {t.name: [c.name for c in t.consumers()] for t in tie} == readers


def test_swish_shows_its_input_and_output_apart():
    """A custom gradient hands results and arguments through one IdentityN."""

    def make(mine):
        def step(x):
            with tf.GradientTape() as tape:
                for weight in mine.weights:
                    x = tf.nn.swish(tf.matmul(x, weight))
                loss = tf.reduce_mean(x**2)
            gradients = tape.gradient(loss, mine.weights)
            for weight, gradient in zip(mine.weights, gradients, strict=True):
                weight.assign_sub(0.5 * gradient)
            return loss

        return step

    for config in ({"memory_limit": 0.75}, {"strategy": "sqrt_n", "memory_limit": 0.75}):
        plain, mine = net(), net()
        expected = train(tf.function(make(plain)), plain, BATCHES)
        step = tflms.function(make(mine), {**config, "min_swap_bytes": 0})
        assert train(step, mine, BATCHES) == expected, config
        assert step.report().changed, config
        assert ties(step.get_concrete_function(BATCHES[0]).graph)
