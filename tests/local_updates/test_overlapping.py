from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.local_updates.local_nets import compiled, data, digest, mlp
from tflms.errors import ConfigError
from tflms.local_updates import LocalTrainer, split
from tflms.local_updates.flops import flops_of, live_operations
from tflms.local_updates.windows import Window, windows_of

X, Y = data()


def fitted(model, optimizer, **options):
    trainer = LocalTrainer(model, split(model), method="overlapping", **options)
    compiled(trainer, optimizer)
    keras.utils.set_random_seed(2)
    trainer.fit(X, Y, epochs=2, batch_size=32, verbose=0)
    return trainer


def weights(trainer):
    heads = [v for _, exit_ in enumerate(trainer.exit_models) for v in exit_.trainable_variables]
    return [np.asarray(v) for v in [*trainer.source.variables, *heads]]


@pytest.mark.parametrize(
    "shape",
    [{}, {"window": 3, "stride": 1}, {"window": 3, "stride": 2}, {"window": 2, "stride": 2}],
)
def test_the_two_forms_agree_for_plain_descent(shape):
    # BatchNorm is in; dropout is not, since each copy would draw its own mask.
    sgd = keras.optimizers.SGD
    one = fitted(mlp(dropout=0, regularizer="l2"), sgd(0.05), **shape)
    two = fitted(mlp(dropout=0, regularizer="l2"), sgd(0.05), form="duplicates", **shape)
    for a, b in zip(weights(one), weights(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_the_forms_differ_for_adam_because_each_copy_has_its_own_moments():
    one = fitted(mlp(dropout=0), "adam")
    two = fitted(mlp(dropout=0), "adam", form="duplicates")
    assert digest(one.source) != digest(two.source)


def test_duplicates_averaged_rarely_still_meet_at_the_average():
    rare = fitted(mlp(dropout=0), keras.optimizers.SGD(0.05), form="duplicates", sync_every=3)
    blocks = rare._runtime._blocks  # 6 batches: the last step was an average
    for (number, index), block in blocks.items():
        own = blocks[rare._runtime._owner[index], index]
        for a, b in zip(block.trainable_variables, own.trainable_variables, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(number))
    often = fitted(mlp(dropout=0), keras.optimizers.SGD(0.05), form="duplicates")
    assert digest(rare.source) != digest(often.source)


def step_flops(trainer):
    def step(x, y):
        return trainer.train_step((x, y))

    graph = tf.function(step, autograph=False).get_concrete_function(
        tf.TensorSpec((32, 64)), tf.TensorSpec((32,), tf.int32)
    )
    return flops_of(live_operations(graph.graph))


def test_the_cotangent_form_costs_no_more_than_backpropagation_and_its_heads():
    def built(**options):
        model = mlp(depth=6, width=64, inputs=64, classes=2, dropout=0)
        return step_flops(compiled(LocalTrainer(model, split(model), **options)))

    backprop = built(method="backprop")
    overlapping = built(method="overlapping")
    duplicates = built(method="overlapping", form="duplicates")
    heads = 5 * 3 * 2 * 32 * 64 * 2  # five heads, forward and two backward products
    assert backprop < overlapping <= backprop + heads
    assert duplicates > 1.5 * overlapping


def test_one_step_on_scalars_is_the_mean_of_two_gradients_computed_by_hand():
    # h1 = a x, h2 = b h1, h3 = c h2, losses (d h2 - y)^2 and (h3 - y)^2: b is in both windows.
    def scalar(value):
        start = keras.initializers.Constant(value)
        return keras.layers.Dense(1, use_bias=False, kernel_initializer=start)

    entry = keras.Input((1,))
    a, b, c = scalar(0.5), scalar(-2.0), scalar(1.5)
    model = keras.Model(entry, c(b(a(entry))))
    trainer = LocalTrainer(
        model, split(model), method="overlapping", heads=lambda shape: scalar(3.0)
    )
    trainer.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    x, y = 2.0, 1.0
    trainer.fit(np.array([[x]]), np.array([[y]]), verbose=0)
    h1, h2 = 0.5 * x, -2.0 * 0.5 * x
    first, second = 2 * (3 * h2 - y), 2 * (1.5 * h2 - y)
    expected = [
        0.5 - 0.01 * first * 3 * -2.0 * x,
        -2.0 - 0.01 * (first * 3 * h1 + second * 1.5 * h1) / 2,
        1.5 - 0.01 * second * h2,
    ]
    found = [float(np.asarray(layer.kernel).item()) for layer in (a, b, c)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_windows_cover_every_chunk_and_end_with_the_network():
    def pairs(**options):
        return [(w.first, w.last) for w in windows_of("overlapping", **options)]

    assert pairs(chunks=4) == [(0, 1), (1, 2), (2, 3)]
    assert pairs(chunks=5, window=3, stride=2) == [(0, 2), (2, 4)]
    assert pairs(chunks=5, window=2, stride=2) == [(0, 1), (2, 3), (4, 4)]
    assert pairs(chunks=1) == [(0, 0)]
    for chunks in range(1, 8):
        for window in range(1, 8):
            for stride in range(1, window + 1):
                found = windows_of("overlapping", chunks=chunks, window=window, stride=stride)
                held = {i for w in found for i in range(w.first, w.last + 1)}
                assert held == set(range(chunks)) and found[-1].last == chunks - 1
    assert windows_of("last", chunks=3) == (Window(2, 2),)


def test_duplicates_are_refused_where_they_do_not_exist():
    model = mlp()
    with pytest.raises(ConfigError, match="form='cotangent'"):
        LocalTrainer(model, method="overlapping", form="duplicates", runtime="threads")
    with pytest.raises(ConfigError, match="sync_every=4"):
        LocalTrainer(model, method="overlapping", sync_every=4)
