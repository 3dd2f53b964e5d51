"""From graphs, functions and models to chains, and plans that recompute."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tflms
from tflms import checkpointing
from tflms.errors import ConfigError
from tflms.runtime.measure import measure_costs
from tflms.zoo import graphs

v1 = tf.compat.v1
LAYER = 128 * 64 * 4


def perceptron():
    return graphs.mlp(8, width=64, batch=128)


def test_a_graph_becomes_a_chain_of_its_layers():
    made = perceptron()
    found = checkpointing.measure_chain(
        made.graph, loss=made.loss, fetches=[made.loss, made.train_op], config={"batch_size": 128}
    )
    assert found.source == "static"
    assert found.chain.stages == len(found.stages) == 9
    assert found.chain.activation_bytes == (LAYER,) * 9 + (0,)
    assert found.stages[0].first == "MatMul" and found.stages[0].output == "Relu"
    assert found.stages[-1].output == "the loss"
    assert "Relu_3" in str(found) and "9 stages" in str(found)
    assert found.beside_bytes > 0  # the weights and their gradients


def test_times_are_measured_where_feeds_are_given():
    made = perceptron()
    found = checkpointing.measure_chain(
        made.graph,
        loss=made.loss,
        fetches=[made.loss, made.train_op],
        feeds=made.feed_dict(0),
        init=made.init_op,
        config={"batch_size": 128},
    )
    assert found.source == "measured"
    assert all(seconds > 0 for seconds in found.chain.forward_seconds[:8])
    assert all(seconds > 0 for seconds in found.chain.forward_only_seconds[:8])
    # Measured in runs of their own: the same kernels, and not the same times.
    assert found.chain.forward_only_seconds != found.chain.forward_seconds
    schedule = checkpointing.optimal_schedule(found.chain, found.chain.activation_bytes[1] * 7)
    assert schedule.peak_bytes <= LAYER * 7


def residual_model():
    keras.utils.set_random_seed(1)
    inputs = x = keras.Input([16])
    for _ in range(4):
        y = keras.layers.Dense(16, activation="relu")(keras.layers.BatchNormalization()(x))
        x = keras.layers.Add()([x, y])
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("adam", "mse", metrics=["mae"])
    return model


def test_a_model_becomes_a_chain_of_blocks_and_keeps_its_weights():
    model = residual_model()
    x, y = np.ones([32, 16], "float32"), np.ones([32, 1], "float32")
    before = [w.tobytes() for w in model.get_weights()]
    found = checkpointing.measure_chain(model, x, y)
    assert [w.tobytes() for w in model.get_weights()] == before
    sums = [stage for stage in found.stages if "add" in stage.output]
    assert len(sums) >= 3  # the skip lies inside each block
    assert all(stage.saved_bytes >= stage.output_bytes for stage in found.stages)
    model.fit(x, y, verbose=0)


def test_a_function_becomes_a_chain():
    weights = [tf.Variable(tf.ones([16, 16])) for _ in range(5)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for w in weights:
                x = tf.nn.tanh(x @ w)
            loss = tf.reduce_sum(x)
        return loss, tape.gradient(loss, weights)

    found = checkpointing.measure_chain(step, tf.ones([64, 16]))
    assert [stage.forward_ops for stage in found.stages[:3]] == [2, 2, 2]


def test_a_model_is_measured_on_copies_of_its_variables():
    model = residual_model()
    x, y = np.ones([32, 16], "float32"), np.ones([32, 1], "float32")
    before = [w.tobytes() for w in model.get_weights()]
    found = checkpointing.measure_chain(model, x, y, config={"cost": "measured"})
    estimated = checkpointing.measure_chain(model, x, y)
    assert found.source.startswith("measured")
    assert [w.tobytes() for w in model.get_weights()] == before
    assert int(model.optimizer.iterations.numpy()) == 0
    assert found.chain.saved_bytes == estimated.chain.saved_bytes
    blocks = [stage for stage in found.stages if "add" in stage.output]
    assert all(stage.forward_seconds > 0 and stage.backward_seconds > 0 for stage in blocks)
    assert all(stage.forward_only_seconds > 0 for stage in blocks)


def test_a_function_is_measured_with_what_it_captures():
    weights = [tf.Variable(0.1 * tf.ones([16, 16])) for _ in range(4)]
    scale = tf.constant(2.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for w in weights:
                x = tf.nn.tanh(scale * (x @ w))
            loss = tf.reduce_sum(x)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(gradient)
        return loss

    found = checkpointing.measure_chain(step, tf.ones([64, 16]), config={"cost": "measured"})
    assert found.source.startswith("measured") and found.chain.stages >= 4
    assert sum(found.chain.backward_seconds) > 0
    assert all((w.numpy() == np.float32(0.1)).all() for w in weights)


def test_long_skips_are_shown_as_what_is_kept():
    made = graphs.unet3d(size=32)
    found = checkpointing.measure_chain(
        made.graph, loss=made.loss, fetches=[made.loss, made.train_op]
    )
    assert found.chain.stages >= 8
    assert "down0b/Relu" in found.kept and found.kept_bytes >= 32**3 * 16 * 4
    assert "kept across stages" in str(found) and "down0b/Relu" in str(found)
    outputs = " ".join(stage.output for stage in found.stages)
    assert "join0" in outputs and "down1a/Relu" in outputs


def test_what_is_no_step_is_refused():
    with pytest.raises(ConfigError, match="no gradients"):
        checkpointing.measure_chain(lambda x: x + 1, tf.ones([2]))
    with pytest.raises(ConfigError, match="takes a"):
        checkpointing.measure_chain("resnet")
    with pytest.raises(ConfigError, match="compile"):
        checkpointing.measure_chain(residual_model())
    with pytest.raises(ConfigError, match="feeds"):
        checkpointing.measure_chain(lambda x: x, tf.ones([2]), feeds={})


def trained(made, steps=2):
    with v1.Session(graph=made.graph) as session:
        session.run(made.init_op)
        losses = [session.run([made.loss, made.train_op], made.feed_dict(i))[0] for i in
                  range(steps)]  # fmt: skip
        with made.graph.as_default():
            values = session.run(v1.global_variables())
    return [loss.tobytes() for loss in losses] + [value.tobytes() for value in values]


def test_a_plan_that_recomputes_is_saved_and_played_on_the_same_model_built_again(tmp_path):
    config = {"strategy": "optimal_checkpointing", "memory_limit": 0.7, "batch_size": 128}
    made = perceptron()
    fetches = [made.loss, made.train_op]
    plan = tflms.plan(made.graph, config, loss=made.loss, fetches=fetches)
    assert plan.predicted_peak_bytes <= 0.7 * plan.plain_peak_bytes
    assert plan.predicted_seconds > plan.plain_seconds
    plan.save(tmp_path / "plan.json")
    again = perceptron()
    report = tflms.rewrite(again.graph, plan=tflms.Plan.load(tmp_path / "plan.json"))
    assert report.recomputes and report.verify().ok
    assert report.predicted_peak_bytes == plan.predicted_peak_bytes
    assert trained(again) == trained(perceptron())


def test_a_plan_compares_with_the_plain_step_by_the_costs_that_it_was_made_with(tmp_path):
    made = perceptron()
    fetches = [made.loss, made.train_op]
    measure_costs(made.graph, fetches=fetches, feeds=made.feed_dict(0), init=made.init_op).save(
        tmp_path / "costs.json"
    )
    again = perceptron()
    plan = tflms.plan(
        again.graph,
        {"strategy": "recompute_all", "batch_size": 128, "cost": str(tmp_path / "costs.json")},
        loss=again.loss,
        fetches=[again.loss, again.train_op],
    )
    assert 1 < plan.predicted_seconds / plan.plain_seconds < 10


def test_the_report_tells_what_runs_again():
    made = perceptron()
    config = {"strategy": "recompute_all", "batch_size": 128}
    report = tflms.rewrite(made.graph, config, loss=made.loss, fetches=[made.loss, made.train_op])
    first = report.recomputes[0]
    assert f"{first.op} is recomputed when {first.anchor} has run" in report.why(first.clones[0])
    assert "recomputed" in str(report)
    assert any("stages" in note for note in report.notes)
    assert report.predicted_seconds > report.plain_seconds


def test_what_fits_is_left_alone():
    made = perceptron()
    config = {"strategy": "optimal_checkpointing", "memory_limit": "1GB", "batch_size": 128}
    report = tflms.rewrite(made.graph, config, loss=made.loss, fetches=[made.loss, made.train_op])
    assert not report.changed
    assert "as it is" in report.notes[0]
