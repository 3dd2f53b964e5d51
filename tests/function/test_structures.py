"""Gradients, calls, loops and branches in the functions that are rewritten."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import tflms
from tests.function.steps import EVERYTHING, Net, batch, train


def both(make, batches):
    """Train a plain and a rewritten build; return whether they agree, and the report."""
    nets = [Net(), Net()]
    expected = train(tf.function(make(nets[0])), nets[0], batches)
    step = tflms.function(make(nets[1]), EVERYTHING)
    return train(step, nets[1], batches) == expected, step


BATCHES = [batch(seed=i) for i in range(3)]


def update(net, gradients):
    for weight, gradient in zip(net.weights, gradients, strict=True):
        weight.assign_sub(0.5 * gradient)


def test_tf_gradients_inside_a_function_are_seen():
    def make(net):
        def step(x):
            loss = tf.reduce_mean(net.forward(x) ** 2)
            update(net, tf.gradients(loss, net.weights))
            return loss

        return step

    same, step = both(make, BATCHES)
    assert same
    assert step.report().changed


def test_a_custom_gradient_keeps_its_own_backward():
    def make(net):
        @tf.custom_gradient
        def twice_back(x):
            y = tf.tanh(x)
            return y, lambda dy: 2.0 * dy * (1.0 - y * y)

        def step(x):
            with tf.GradientTape() as tape:
                for weight in net.weights:
                    x = tf.tanh(twice_back(tf.matmul(x, weight)))
                loss = tf.reduce_mean(x**2)
            update(net, tape.gradient(loss, net.weights))
            return loss

        return step

    same, step = both(make, BATCHES)
    assert same
    assert step.report().changed


def test_a_step_called_by_a_loop_over_batches_is_rewritten_inside():
    nets = [Net(), Net()]
    data = tf.stack(BATCHES)

    def epoch_of(step):
        @tf.function
        def epoch(data):
            loss = 0.0
            for i in tf.range(3):
                loss = step(data[i])
            return loss

        return epoch

    plain = epoch_of(tf.function(nets[0].step))
    with tflms.enabled(EVERYTHING) as traced:
        rewritten = epoch_of(tf.function(nets[1].step))
        got = rewritten(data)
    assert np.asarray(got) == np.asarray(plain(data))
    assert [report.subject for report in traced.reports] == ["step"]
    assert traced.report.changed
    assert traced.report.verify().ok


def test_a_step_written_into_a_loop_body_is_rewritten_in_the_body():
    def make(net):
        def steps(x):
            loss = 0.0
            for _ in tf.range(3):
                loss = net.step(x)
            return loss

        return steps

    same, step = both(make, BATCHES)
    assert same
    assert step.report().changed
    assert "body" in step.report().subject
    assert step.report().verify().ok


def test_loops_and_branches_in_the_model_are_left_alone_and_said_so():
    def make(net):
        def step(x):
            with tf.GradientTape() as tape:
                h = net.forward(x)
                for _ in tf.range(3):
                    h = tf.tanh(tf.matmul(h, net.weights[0]))
                if tf.reduce_sum(h) > 0.0:
                    h = h * 2.0
                loss = tf.reduce_mean(net.forward(h) ** 2)
            update(net, tape.gradient(loss, net.weights))
            return loss

        return step

    same, step = both(make, BATCHES)
    assert same
    report = step.report()
    assert report.changed
    assert any("bodies of 4 loops and branches were left alone" in note for note in report.notes)


def test_nested_functions_train_rightly_and_are_said_to_be_closed():
    def make(net):
        half = tf.function(net.forward)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(half(half(x)) ** 2)
            update(net, tape.gradient(loss, net.weights))
            return loss

        return step

    same, step = both(make, BATCHES)
    assert same
    assert any("calls of other functions" in note for note in step.report().notes)


def test_two_losses_of_one_forward_phase_are_both_taken():
    def make(net):
        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                y = net.forward(x)
                first, second = tf.reduce_mean(y**2), tf.reduce_mean(tf.abs(y))
            gradients = [
                a + b
                for a, b in zip(
                    tape.gradient(first, net.weights),
                    tape.gradient(second, net.weights),
                    strict=True,
                )
            ]
            update(net, gradients)
            return first + second

        return step

    same, step = both(make, BATCHES)
    assert same
    assert step.report().changed
    assert not any("gradient computations" in note for note in step.report().notes)


def test_a_penalty_on_gradients_leaves_the_smaller_computation_alone_and_says_so():
    def make(net):
        def step(x):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = net.forward(x)
                penalty = tf.reduce_mean(inner.gradient(y, x) ** 2)
                loss = tf.reduce_mean(y**2) + penalty
            update(net, tape.gradient(loss, net.weights))
            return loss

        return step

    same, step = both(make, BATCHES)
    assert same
    assert step.report().changed
    assert any("1 of 2 gradient computations" in note for note in step.report().notes)


def test_gradients_that_wait_for_each_other_do_not_hide_the_turn():
    """A global norm lets every gradient reach every update, and their bytes pile up at the end."""

    def make(net):
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(net.forward(x) ** 2)
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, net.weights), 0.1)
            update(net, gradients)
            return loss

        return step

    same, step = both(make, BATCHES)
    assert same
    assert len(step.report().swaps) >= 3


def test_sparse_gradients_and_dropout_come_out_the_same():
    def make(net):
        table = net.weights[0]

        def step(x):
            ids = tf.cast(tf.abs(x[:, 0]) * 5.0, tf.int32) % 16
            with tf.GradientTape() as tape:
                h = tf.nn.embedding_lookup(table, ids)
                for weight in net.weights[1:]:
                    h = tf.nn.experimental.stateless_dropout(h, 0.3, seed=[1, 2])
                    h = tf.tanh(tf.matmul(h, weight))
                loss = tf.reduce_mean(h**2)
            gradients = tape.gradient(loss, net.weights)
            assert isinstance(gradients[0], tf.IndexedSlices)
            table.scatter_sub(gradients[0])
            for weight, gradient in zip(net.weights[1:], gradients[1:], strict=True):
                weight.assign_sub(0.5 * gradient)
            return loss

        return step

    same, step = both(make, BATCHES)
    assert same
    assert step.report().changed
