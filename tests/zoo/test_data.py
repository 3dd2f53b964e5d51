"""The brain volume, its crops and its slices."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tflms.errors import ConfigError, TflmsError
from tflms.zoo import data


def test_the_brain_comes_in_any_cubic_size():
    for size in (16, 33, 64, 192):
        image, labels = data.brain(size)
        assert image.shape == (size, size, size, 1)
        assert labels.shape == (size, size, size)
        assert image.dtype == np.float32
        assert labels.dtype == np.int32
        assert abs(float(image.mean())) < 1e-3
        assert abs(float(image.std()) - 1.0) < 1e-3


def test_the_labels_are_tissues_that_differ_in_brightness():
    image, labels = data.brain(48)
    shares = np.bincount(labels.ravel(), minlength=3) / labels.size
    assert 0.7 < shares[0] < 0.8  # air, bone and fluid
    assert 0.1 < shares[1] < 0.2  # grey matter
    assert 0.05 < shares[2] < 0.15  # white matter
    background, grey, white = (float(image[labels == k].mean()) for k in range(3))
    assert background < grey < white  # T1: white matter is brightest


def test_a_smaller_brain_is_the_mean_of_the_larger_ones_voxels():
    def shape_of(image):
        return (image - image.min()) / (image.max() - image.min())

    fine, _ = data.brain(192)
    coarse, _ = data.brain(48)
    blocks = fine[..., 0].reshape(48, 4, 48, 4, 48, 4).mean(axis=(1, 3, 5))
    np.testing.assert_allclose(shape_of(coarse[..., 0]), shape_of(blocks), atol=1e-4)


def test_the_whole_brain_lies_in_the_cube():
    _, labels = data.brain(192)
    for axis in range(3):
        faces = np.take(labels, [0, 1, -2, -1], axis=axis)
        assert not faces.any()


def test_a_crop_is_a_part_of_the_volume_and_its_labels_go_with_it():
    image = np.arange(10**3, dtype=np.float32).reshape(10, 10, 10, 1)
    labels = np.arange(10**3, dtype=np.int32).reshape(10, 10, 10)
    seen = set()
    for seed in range(20):
        x, y = data.crop(image, labels, size=4, seed=seed)
        np.testing.assert_array_equal(x[..., 0], y.astype(np.float32))
        assert len(np.unique(y)) == 4**3
        assert int(y.max()) - int(y.min()) == 333  # the corners of one 4-cube
        seen.add(int(y[0, 0, 0]))
    assert len(seen) > 10


def test_crops_repeat_with_their_seed_and_differ_without():
    image, labels = data.brain(24)
    first = data.crops(image, labels, size=16, batch=3, seed=1)
    again = data.crops(image, labels, size=16, batch=3, seed=1)
    other = data.crops(image, labels, size=16, batch=3, seed=2)
    assert first[0].shape == (3, 16, 16, 16, 1)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


def test_slices_show_their_class():
    images, labels = data.slices(32, count=120, classes=3, channels=1)
    assert images.shape == (120, 32, 32, 1)
    assert sorted(set(labels.tolist())) == [0, 1, 2]
    # A nearest-mean classifier, trained on one half, tells the planes of the other half.
    means = [images[:60][labels[:60] == k].mean(axis=0) for k in range(3)]
    distances = [((images[60:] - mean) ** 2).sum(axis=(1, 2, 3)) for mean in means]
    guesses = np.argmin(distances, axis=0)
    assert (guesses == labels[60:]).mean() > 0.6


def test_slices_can_be_larger_than_the_volume():
    images, _ = data.slices(224, count=1, classes=12)
    assert images.shape == (1, 224, 224, 3)
    assert np.isfinite(images).all()


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="193"):
        data.brain(193)
    with pytest.raises(ConfigError, match="size is 0"):
        data.brain(0)
    with pytest.raises(ConfigError, match="does not fit"):
        data.crop(*data.brain(8), size=9, seed=0)
    with pytest.raises(ConfigError, match="multiple of 3"):
        data.slices(8, count=1, classes=10)
    with pytest.raises(ConfigError, match="channels is 2"):
        data.slices(8, count=1, channels=2)


def test_a_missing_nilearn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nilearn", None)
    data._template.cache_clear()
    with pytest.raises(TflmsError, match=r"pip install 'tflms\[examples\]'"):
        data.brain(8)
