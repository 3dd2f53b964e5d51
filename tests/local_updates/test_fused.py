from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.local_updates.local_nets import compiled, data, digest, losses, mlp, residual
from tflms.errors import ConfigError
from tflms.local_updates import ChunkError, LocalTrainer, split
from tflms.local_updates.step import Back, Done, Need, train_step

layers = keras.layers
X, Y = data()


def fitted(model, trainer, *, epochs=2, x=X, y=Y, optimizer="adam", **options):
    compiled(trainer, optimizer)
    keras.utils.set_random_seed(2)
    history = trainer.fit(x, y, epochs=epochs, batch_size=32, verbose=0, **options)
    return digest(model), history.history


def test_one_chunk_trains_exactly_as_plain_fit_does():
    # Adam, BatchNorm, Dropout, a penalty, shuffling and validation: weights, states and history.
    plain = mlp(regularizer="l2")
    expected = fitted(plain, plain, validation_data=(X, Y))
    model = mlp(regularizer="l2")
    trainer = LocalTrainer(model, split(model, chunks=1))
    assert fitted(model, trainer, validation_data=(X, Y)) == expected


@pytest.mark.parametrize("build", [mlp, residual])
def test_backprop_over_chunks_is_one_tape_bit_for_bit(build):
    x = X if build is mlp else np.random.default_rng(1).normal(size=(96, 8, 8, 3)).astype("f4")
    plain = build()
    compiled(plain, jit_compile=False)
    keras.utils.set_random_seed(2)
    plain.fit(x, Y, epochs=2, batch_size=32, verbose=0)
    for chunks in (2, 3):
        model = build()
        trainer = LocalTrainer(model, split(model, chunks=chunks), method="backprop")
        assert fitted(model, trainer, x=x)[0] == digest(plain)


def test_a_window_over_all_chunks_is_backpropagation():
    digests = []
    for options in ({"method": "backprop"}, {"method": "overlapping", "window": 3, "stride": 1}):
        model = mlp()
        digests.append(fitted(model, LocalTrainer(model, split(model, chunks=3), **options))[0])
    assert digests[0] == digests[1]


def test_no_loss_reaches_the_variables_of_another_chunk():
    model = mlp()
    trainer = compiled(LocalTrainer(model, split(model, chunks=3)))
    variables = [list(stage.trainable) for stage in trainer.stages]
    tensors = [tf.constant(X[:8])]
    with tf.GradientTape(persistent=True) as tape:
        values = []
        for stage in trainer.stages:
            events = list(train_step(stage, tensors, tf.constant(Y[:8]), None))
            assert not any(isinstance(event, (Back, Need)) for event in events)
            tensors = [tf.stop_gradient(t) for t in events[0].outputs]
            values.append(events[-1].loss)
    for owner, loss in enumerate(values):
        for other, held in enumerate(variables):
            gradients = tape.gradient(loss, held)
            assert all(g is None for g in gradients) == (owner != other)


def test_scrambled_labels_of_a_later_chunk_leave_the_earlier_chunk_alone():
    def first_chunk(heads):
        model = mlp(dropout=0)
        plan = split(model, chunks=2)
        trainer = LocalTrainer(model, plan, heads=heads)
        fitted(model, trainer)
        return [np.asarray(v) for v in plan.nets[0].model.variables], np.asarray(model.weights[-1])

    keras.utils.set_random_seed(0)
    before, last_before = first_chunk("pool_linear")
    # The second chunk's loss changes (its last layer is frozen), the first one's cannot.
    model = mlp(dropout=0)
    model.get_layer("logits").trainable = False
    plan = split(model, chunks=2)
    fitted(model, LocalTrainer(model, plan))
    for a, b in zip(before, plan.nets[0].model.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(last_before, np.asarray(model.weights[-1]))


def test_one_step_of_greedy_on_scalars_is_the_update_computed_by_hand():
    # Two layers h1 = a x, h2 = b h1, heads: loss mean((c h1 - y)^2) and mean((h2 - y)^2).
    entry = keras.Input((1,))
    first = layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(0.5))
    second = layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(-2.0))
    model = keras.Model(entry, second(first(entry)))

    def head(shape):
        start = keras.initializers.Constant(3.0)
        return layers.Dense(1, use_bias=False, kernel_initializer=start)

    trainer = LocalTrainer(model, split(model, chunks=2), heads=head)
    trainer.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    x, y = 2.0, 1.0
    trainer.fit(np.array([[x]]), np.array([[y]]), verbose=0, batch_size=1)
    h = 0.5 * x
    a = 0.5 - 0.01 * 2 * (3 * h - y) * 3 * x
    c = 3.0 - 0.01 * 2 * (3 * h - y) * h
    b = -2.0 - 0.01 * 2 * (-2 * h - y) * h
    found = [float(np.asarray(v).item()) for v in [first.kernel, second.kernel]]
    head_weight = float(np.asarray(trainer.stages[0].exit.trainable_variables[0]).item())
    np.testing.assert_allclose([*found, head_weight], [a, b, c], rtol=1e-6)


def test_last_trains_the_last_chunk_alone():
    model = mlp(dropout=0, norm=False)
    plan = split(model, chunks=3)
    before = [[np.asarray(v).copy() for v in net.model.trainable_variables] for net in plan.nets]
    fitted(model, LocalTrainer(model, plan, method="last"))
    moved = [
        any(
            not np.array_equal(a, b)
            for a, b in zip(old, net.model.trainable_variables, strict=True)
        )
        for old, net in zip(before, plan.nets, strict=True)
    ]
    assert moved == [False, False, True]


def test_metrics_come_per_exit_and_evaluation_reads_last_all_or_ensemble():
    model = mlp()
    trainer = LocalTrainer(model, split(model, chunks=3))
    _, history = fitted(model, trainer, validation_data=(X, Y))
    names = {"loss", "accuracy", "loss_0", "accuracy_0", "loss_1", "accuracy_1"}
    assert names | {"val_loss", "val_accuracy"} == set(history)
    every = trainer.evaluate(X, Y, exits="all", return_dict=True, verbose=0)
    last = trainer.evaluate(X, Y, return_dict=True, verbose=0)
    assert set(every) == names and set(last) == {"loss", "accuracy"}
    assert every["loss"] == last["loss"]
    assert trainer.evaluate(X, Y, verbose=0) == [last["loss"], last["accuracy"]]
    order = ["loss", "accuracy", "loss_0", "accuracy_0", "loss_1", "accuracy_1"]
    assert trainer.evaluate(X, Y, exits="all", verbose=0) == [every[name] for name in order]
    outputs = [trainer.export(exit=k).predict(X, verbose=0) for k in (0, 1, None)]
    for k in (0, 1):
        own = losses()(Y, outputs[k])
        np.testing.assert_allclose(every[f"loss_{k}"], own, rtol=1e-5)
    mixed = (outputs[0] + 2 * outputs[1] + 4 * outputs[2]) / 7
    both = trainer.evaluate(X, Y, exits="ensemble", return_dict=True, verbose=0)
    np.testing.assert_allclose(both["loss"], losses()(Y, mixed), rtol=1e-5)
    np.testing.assert_allclose(both["accuracy"], np.mean(mixed.argmax(1) == Y), rtol=1e-6)


def test_export_gives_plain_models_that_save_and_load(tmp_path):
    model = mlp()
    trainer = LocalTrainer(model, split(model, chunks=2))
    fitted(model, trainer)
    assert trainer.export() is model
    early = trainer.export(exit=0)
    early.save(tmp_path / "early.keras")
    loaded = keras.models.load_model(tmp_path / "early.keras")
    np.testing.assert_allclose(loaded(X), early(X), rtol=1e-6)
    with pytest.raises(ConfigError, match="chunk 7 has no exit"):
        trainer.export(exit=7)


def test_each_chunk_has_its_own_optimizer_and_callbacks_set_the_rate_of_all():
    model = mlp()
    trainer = compiled(LocalTrainer(model, split(model, chunks=3)))
    assert len({id(stage.optimizer) for stage in trainer.stages}) == 3
    keras.utils.set_random_seed(2)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    trainer.fit(X, Y, epochs=2, batch_size=32, verbose=0, callbacks=[schedule])
    rates = [float(stage.optimizer.learning_rate) for stage in trainer.stages]
    np.testing.assert_allclose(rates, [0.05] * 3)
    different = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(), keras.optimizers.RMSprop()]
    trainer.compile(optimizer=different, loss=losses())
    assert [stage.optimizer for stage in trainer.stages] == different


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_trains_each_chunk(policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = mlp(norm=False)
        trainer = compiled(LocalTrainer(model, split(model, chunks=2)))
    finally:
        keras.config.set_dtype_policy("float32")
    scaled = [type(stage.optimizer).__name__ == "LossScaleOptimizer" for stage in trainer.stages]
    assert scaled == [policy == "mixed_float16"] * 2
    history = trainer.fit(X, Y, epochs=4, batch_size=32, verbose=0).history
    assert history["loss_0"][-1] < history["loss_0"][0]


def test_float16_is_refused_where_gradients_cross_chunks():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = mlp(norm=False)
    finally:
        keras.config.set_dtype_policy("float32")
    with pytest.raises(ConfigError, match="mixed_bfloat16"):
        compiled(LocalTrainer(model, split(model, chunks=2), method="backprop"))


def test_sample_weights_and_tf_datasets_pass_through():
    weights = np.linspace(0, 2, len(X)).astype("float32")
    plain, model = mlp(), mlp()
    batches = tf.data.Dataset.from_tensor_slices((X, Y, weights)).batch(32)
    compiled(plain)
    keras.utils.set_random_seed(2)
    plain.fit(batches, epochs=2, verbose=0)
    trainer = compiled(LocalTrainer(model, split(model, chunks=1)))
    keras.utils.set_random_seed(2)
    trainer.fit(batches, epochs=2, verbose=0)
    assert digest(plain) == digest(model)


def test_a_loss_that_is_no_number_ends_the_run_and_names_chunk_and_batch():
    weights = np.ones(len(X), "float32")
    weights[40] = np.nan  # the second batch; a NaN input would drown in a fused ReLU
    model = mlp(norm=False, dropout=0)
    trainer = compiled(LocalTrainer(model, split(model, chunks=2)))
    with pytest.raises(ChunkError, match="batch 1") as caught:
        trainer.fit(X, Y, sample_weight=weights, batch_size=32, shuffle=False, verbose=0)
    assert caught.value.batch == 1


def test_wrong_settings_are_refused_with_a_reason():
    model = mlp()
    plan = split(model, chunks=2)
    with pytest.raises(ConfigError, match="greedy"):
        LocalTrainer(model, plan, method="gready")
    with pytest.raises(ConfigError, match="another model"):
        LocalTrainer(mlp(), plan)
    with pytest.raises(ConfigError, match="is no plan"):
        LocalTrainer(model, "2 chunks")
    with pytest.raises(ConfigError, match=r"queue_size=1\.5"):
        LocalTrainer(model, plan, queue_size=1.5)
    with pytest.raises(ConfigError, match="timeout=0"):
        LocalTrainer(model, plan, timeout=0)
    with pytest.raises(ConfigError, match=r"'/GPU:77', this process has /CPU:0"):
        LocalTrainer(model, plan, devices=["/CPU:0", "/GPU:77"])
    with pytest.raises(ConfigError, match="write it like"):
        LocalTrainer(model, plan, devices=["one", "two"])
    with pytest.raises(ConfigError, match="1 devices for 2 chunks"):
        LocalTrainer(model, plan, devices="/CPU:0")
    with pytest.raises(ConfigError, match="XLA"):
        compiled(LocalTrainer(model, plan), jit_compile=True)
    with pytest.raises(ConfigError, match="stride=2"):
        LocalTrainer(model, plan, method="overlapping", window=1, stride=2)
    with pytest.raises(ConfigError, match="one optimizer twice"):
        adam = keras.optimizers.Adam()
        LocalTrainer(model, plan).compile(optimizer=[adam, adam], loss="mse")
    with pytest.raises(ConfigError, match="global_clipnorm"):
        clipped = keras.optimizers.SGD(global_clipnorm=1.0)
        LocalTrainer(model, plan, method="backprop").compile(optimizer=clipped, loss="mse")


def test_the_generator_of_a_plain_chunk_ends_with_its_gradients():
    model = mlp()
    trainer = compiled(LocalTrainer(model, split(model, chunks=2)))
    events = list(train_step(trainer.stages[0], [tf.constant(X[:8])], tf.constant(Y[:8]), None))
    assert isinstance(events[-1], Done)
    assert len(events[-1].gradients) == len(trainer.stages[0].trainable)
