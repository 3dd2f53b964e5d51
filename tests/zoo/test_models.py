"""The Keras models of the zoo: published sizes, repeatable weights, and they train."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tflms.errors import ConfigError
from tflms.zoo import graphs, models, tasks

SMALL = {
    "deep_resnet": {"depth": 11, "image": 8, "filters": 2},
    "densenet121": {"image": 32},
    "inception_v3": {"image": 75},
    "mobilenet_v3": {"image": 32},
    "recurrent": {"steps": 4, "width": 8},
    "residual_mlp": {"layers": 3, "width": 8},
    "resnet18": {"image": 32},
    "resnet50": {"image": 32},
    "resnet101": {"image": 32},
    "transformer": {"layers": 2, "width": 8, "heads": 2, "tokens": 8, "vocabulary": 11},
    "unet3d": {"size": 8, "filters": 2, "levels": 3},
    "vgg16": {"image": 32, "classes": 10},
}
# Parameters with moving statistics. ResNet-50, DenseNet-121, Inception-v3: Keras's table of
# applications. ResNet-18, -101: torchvision's tables (11,689,512 and 44,549,160 parameters) and
# two moving statistics for each of 4,800 and 52,672 normalized channels.
PUBLISHED = {
    "resnet18": 11_689_512 + 2 * 4_800,
    "resnet50": 25_636_712,
    "resnet101": 44_549_160 + 2 * 52_672,
    "densenet121": 8_062_504,
    "inception_v3": 23_851_784,
}
QUICK = ("deep_resnet", "recurrent", "residual_mlp", "transformer", "unet3d")


@pytest.fixture(autouse=True)
def fresh_keras():
    yield
    keras.backend.clear_session()


def test_every_builder_has_a_small_setting_here():
    assert sorted(SMALL) == sorted(models.BUILDERS)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_models_have_their_published_size_and_a_batch_of_noise_fits_them(name):
    made = tasks.task(name, batch=2, **SMALL[name])
    assert made.inputs.shape == (2, *made.model.input_shape[1:])
    assert made.labels.shape == (2, *made.model.output_shape[1:-1])
    assert made.labels.dtype == np.int32
    assert 0 <= made.labels.min() <= made.labels.max() < made.model.output_shape[-1]
    if name in PUBLISHED:
        assert made.model.count_params() == PUBLISHED[name]


@pytest.mark.parametrize("name", QUICK)
def test_the_loss_falls(name):
    made = tasks.task(name, batch=4, **SMALL[name])
    model = made.compile("adam")
    losses = [float(model.train_on_batch(made.inputs, made.labels)) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", QUICK)
def test_seeds_decide_the_weights(name):
    def weights(seed):
        return models.BUILDERS[name](seed=seed, **SMALL[name]).get_weights()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_deep_resnets_have_the_depth_they_are_named_by():
    model = models.deep_resnet(164)
    flat = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Conv2D)]
    projections = 3  # shortcuts that change the shape are not counted
    assert len(flat) - projections + 1 == 164
    assert 1.6e6 < model.count_params() < 1.8e6  # 1.7 million in the paper


def test_the_keras_unet_has_the_weights_of_the_graph():
    built = graphs.unet3d(16, 4, levels=3)
    in_graph = [tuple(v.shape) for v in built.graph.get_collection("trainable_variables")]
    model = models.unet3d(16, 4, levels=3)
    assert [tuple(v.shape) for v in model.trainable_weights] == in_graph


def test_the_transformer_does_not_look_ahead():
    model = models.transformer(2, 16, heads=2, tokens=8, vocabulary=11)
    text = np.arange(8, dtype=np.int32)[None]
    changed = text.copy()
    changed[0, 5:] = 10
    before, after = model(text).numpy(), model(changed).numpy()
    np.testing.assert_allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3


def test_a_transformer_is_saved_and_loaded(tmp_path):
    model = models.transformer(1, 8, heads=2, tokens=4, vocabulary=5, dropout=0.1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    text = np.array([[1, 2, 3, 4]], np.int32)
    np.testing.assert_array_equal(model(text), loaded(text))


@pytest.mark.parametrize("cell", ["gru", "simple"])
def test_other_cells_are_unrolled_too(cell):
    model = models.recurrent(3, 4, layers=2, cell=cell)
    assert model.output_shape == (None, 10)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="11 or 20"):
        models.deep_resnet(10)
    with pytest.raises(ConfigError, match="multiple of 8"):
        models.unet3d(12)
    with pytest.raises(ConfigError, match="gru, lstm, simple"):
        models.recurrent(cell="elman")
    with pytest.raises(ConfigError, match="did you mean 'resnet50'"):
        tasks.task("resnet_50", batch=1)
