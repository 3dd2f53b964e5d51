"""The callback: fit gives the same losses and weights, whatever the model and the settings."""

from __future__ import annotations

import logging

import keras
import pytest
import tensorflow as tf

import tflms
from tests.keras import nets
from tests.keras.nets import EVERYTHING, built, fit

KINDS = [nets.mlp, nets.convolutional, nets.written_out, nets.shared, nets.tokens, nets.subclassed]
KINDS += [nets.gan]


def support(**changes):
    return tflms.keras.LargeModelSupport({**EVERYTHING, **changes})


@pytest.mark.parametrize("build", KINDS, ids=lambda build: build.__name__)
def test_fit_gives_the_same_losses_and_weights_bit_by_bit(build):
    expected = fit(*built(build))
    callback = support()
    assert fit(*built(build), callback) == expected
    assert callback.report.changed
    assert callback.report.subject == "one_step_on_data"
    assert callback.report.verify().ok


def test_the_report_of_an_lstm_says_what_was_not_touched():
    callback = support()
    fit(*built(nets.tokens), callback)
    assert any("loops and branches were left alone" in note for note in callback.report.notes)


def test_the_report_of_a_gan_says_which_gradients_were_left_alone():
    callback = support()
    fit(*built(nets.gan), callback)
    assert any("1 of 2 gradient computations" in note for note in callback.report.notes)


SETTINGS = {
    "several steps an execution": {"steps_per_execution": 2},
    "gradient accumulation": {"optimizer": {"gradient_accumulation_steps": 2}},
    "clipping by global norm": {"optimizer": {"global_clipnorm": 0.01}},
    "moving average of weights": {"optimizer": {"use_ema": True}},
    "loss scaling": {"optimizer": {"loss_scale_factor": 64.0}},
    "metrics": {"metrics": ["mae"]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_fit_gives_the_same_with(name):
    def compiled():
        settings = dict(SETTINGS[name])
        if "optimizer" in settings:
            settings["optimizer"] = keras.optimizers.Adam(1e-2, **settings["optimizer"])
        return built(nets.mlp, **settings)

    expected = fit(*compiled())
    callback = support()
    assert fit(*compiled(), callback) == expected
    assert callback.report.changed


def test_mixed_precision_with_a_loss_that_scales_itself_gives_the_same():
    def run(*callbacks):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
            return fit(*built(nets.mlp, optimizer=optimizer), *callbacks)
        finally:
            keras.config.set_dtype_policy("float32")

    callback = support()
    assert run(callback) == run()
    assert callback.report.changed


def test_tf_data_with_a_smaller_last_batch_gives_the_same():
    def run(*callbacks):
        model, x, y = built(nets.mlp)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
        return nets.outcome(
            model, model.fit(batches, epochs=2, verbose=0, callbacks=list(callbacks))
        )

    callback = tflms.keras.LargeModelSupport({"min_swap_bytes": 0})
    assert run(callback) == run()
    assert callback.report.changed
    assert any("batch of" in note for note in callback.report.notes)


def test_validation_runs_as_it_was_and_gives_the_same():
    model, x, y = built(nets.convolutional)
    expected = fit(model, x, y, validation_data=(x, y))
    model, x, y = built(nets.convolutional)
    callback = support()
    assert fit(model, x, y, callback, validation_data=(x, y)) == expected
    assert [report.subject for report in callback.reports] == ["one_step_on_data"]
    assert callback.report.changed


def test_a_model_that_was_fitted_before_is_rewritten_for_the_next_fit_and_given_back():
    plain, x, y = built(nets.mlp)
    model, _, _ = built(nets.mlp)
    assert fit(model, x, y) == fit(plain, x, y)
    own = model.train_function
    callback = support()
    assert fit(model, x, y, callback) == fit(plain, x, y)
    assert callback.report.changed
    assert model.train_function is own
    count = len(callback.reports)
    assert fit(model, x, y, callback) == fit(plain, x, y)
    assert len(callback.reports) == count  # nothing is traced again
    assert fit(model, x, y) == fit(plain, x, y)


def test_a_model_that_is_compiled_anew_is_traced_anew():
    callback = support()
    model, x, y = built(nets.mlp)
    fit(model, x, y, callback)
    first = callback.report
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    fit(model, x, y, callback)
    assert callback.report is not first
    assert callback.report.changed


def test_two_models_with_two_configs_do_not_mix():
    first, second = support(n_tensors=1), support(n_tensors=3)
    a, x, y = built(nets.mlp)
    fit(a, x, y, first)
    b, _, _ = built(nets.mlp)
    fit(b, x, y, second)
    fit(a, x, y, first)
    assert [len(c.report.swaps) for c in (first, second)] == [1, 3]


def test_saving_loading_and_fitting_on_hold_no_trace_of_the_rewrite(tmp_path):
    keras.backend.clear_session()  # names of layers count from one again
    model, x, y = built(nets.convolutional)
    fit(model, x, y)
    plain_config = save(model, tmp_path / "plain")
    keras.backend.clear_session()
    model, x, y = built(nets.convolutional)
    fit(model, x, y, support())
    assert save(model, tmp_path / "rewritten") == plain_config
    loaded = keras.models.load_model(tmp_path / "rewritten" / "model.keras")
    callback = support()
    again = keras.models.load_model(tmp_path / "plain" / "model.keras")
    assert fit(loaded, x, y, callback) == fit(again, x, y)
    assert callback.report.changed


def save(model, folder):
    folder.mkdir()
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.write(str(folder / "checkpoint"))
    model.export(str(folder / "saved"), verbose=False)
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"tflms" not in path.read_bytes(), path
    return model.to_json()


def test_xla_is_switched_off_for_the_step_alone_and_said_so(caplog):
    model, x, y = built(nets.mlp, jit_compile=True)
    callback = support()
    fit(model, x, y, callback)
    assert "XLA was switched off for the training step" in caplog.text
    assert any("compile(jit_compile=False)" in note for note in callback.report.notes)
    assert callback.report.changed
    assert model.jit_compile is True


def test_a_model_that_runs_eagerly_is_refused():
    model, x, y = built(nets.mlp, run_eagerly=True)
    with pytest.raises(tflms.ConfigError, match="run_eagerly=False"):
        fit(model, x, y, support())


def test_an_error_in_a_step_gives_the_model_its_function_back():
    model, x, y = built(nets.mlp)
    callback = support(incl_scopes=["nowhere"])
    with pytest.raises(tflms.ConfigError, match="nowhere"):
        fit(model, x, y, callback)
    expected = fit(*built(nets.mlp))
    model, x, y = built(nets.mlp)
    assert fit(model, x, y) == expected


def test_a_wrong_config_is_refused_when_the_callback_is_made():
    with pytest.raises(tflms.ConfigError, match="n_tensors"):
        tflms.keras.LargeModelSupport({"n_tensor": 1})


def test_before_fit_the_report_says_that_nothing_was_traced():
    assert support().report.notes == ("nothing was traced",)


def test_small_values_stay_for_the_batch_size_that_is_given():
    """One example's activations are under the limit, those of a thousand are not."""
    sizes = {}
    for batch in (1, 1000):
        callback = tflms.keras.LargeModelSupport({"min_swap_bytes": 1000, "batch_size": batch})
        fit(*built(nets.mlp), callback, batch_size=3)  # of eight: the size is left open
        sizes[batch] = [swap.nbytes for swap in callback.report.swaps]
    assert not sizes[1]
    assert sizes[1000] and min(sizes[1000]) == 1000 * 16 * 4


def test_logging_is_quiet_without_cause(caplog):
    with caplog.at_level(logging.WARNING, logger="tflms"):
        fit(*built(nets.mlp), support())
    assert not [record for record in caplog.records if record.name.startswith("tflms")]
