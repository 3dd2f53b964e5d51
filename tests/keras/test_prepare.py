"""tflms.keras.prepare: train_on_batch and loops of one's own."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tflms
from tests.keras import nets
from tests.keras.nets import EVERYTHING, built, fit


def batches(model, x, y):
    losses = [float(model.train_on_batch(x[i : i + 4], y[i : i + 4])) for i in (0, 4, 0)]
    return losses, [w.tobytes() for w in model.get_weights()]


def test_train_on_batch_gives_the_same():
    expected = batches(*built(nets.convolutional))
    model, x, y = built(nets.convolutional)
    prepared = tflms.keras.prepare(model, EVERYTHING)
    assert batches(model, x, y) == expected
    assert prepared.report.changed
    assert prepared.report.verify().ok


def test_a_model_stays_prepared_when_it_is_compiled_again_until_it_is_closed():
    model, x, y = built(nets.mlp)
    with tflms.keras.prepare(model, EVERYTHING) as prepared:
        batches(model, x, y)
        first = prepared.report
        model.compile("sgd", "mse", jit_compile=False)
        batches(model, x, y)
        assert prepared.report is not first
        fit(model, x, y)
    assert "make_train_function" not in vars(model)
    traced = len(tflms.last_reports())
    fit(model, x, y)
    batches(model, x, y)
    assert len(tflms.last_reports()) == traced


def test_a_loop_of_ones_own_takes_its_step_from_the_prepared_model():
    def loop(make):
        model, x, y = built(nets.mlp)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            weights = model.trainable_weights
            model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return loss

        run, report = make(model, step)
        losses = [float(run(x[:4], y[:4])) for _ in range(3)]
        return losses, [w.tobytes() for w in model.get_weights()], report()

    def prepared(model, step):
        made = tflms.keras.prepare(model, EVERYTHING)
        return made.function(step), lambda: made.report

    losses, weights, _ = loop(lambda model, step: (tf.function(step), lambda: None))
    ours = loop(prepared)
    assert ours[:2] == (losses, weights)
    assert ours[2].changed


def test_what_cannot_be_rewritten_is_refused_at_once():
    model, _, _ = built(nets.mlp, run_eagerly=True)
    with pytest.raises(tflms.ConfigError, match="run_eagerly"):
        tflms.keras.prepare(model, EVERYTHING)
    model, _, _ = nets.mlp()
    with pytest.raises(tflms.ConfigError, match="not compiled"):
        tflms.keras.prepare(model, EVERYTHING)
    model, _, _ = built(nets.mlp)
    tflms.keras.prepare(model, EVERYTHING)
    with pytest.raises(tflms.ConfigError, match="prepared already"):
        tflms.keras.prepare(model, EVERYTHING)
