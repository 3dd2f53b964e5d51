"""Real images that come inside a package: a brain template with its tissues, and slices of it.

The volume is the MNI ICBM 152 template (Fonov et al. 2009, 2011) as nilearn ships it: T1 image,
grey and white matter probabilities, 1 mm voxels. It is an average of 152 people, not a patient.
Nothing is downloaded.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from tflms.errors import ConfigError, TflmsError

LARGEST_SIZE = 192  # voxels of 1 mm; the brain itself is 145 x 181 x 155 of them
TISSUES = ("background", "grey matter", "white matter")
PLANES = ("sagittal", "coronal", "axial")

_BRAIN_INTENSITY = 0.05  # of the template's maximum; below lies air

Image = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]


def brain(size: int = LARGEST_SIZE) -> tuple[Image, Labels]:
    """Return the brain in a cube, and which tissue each voxel is.

    The cube of 192 mm around the brain is cut out (padded with air where the template ends) and
    averaged down to ``size`` voxels an edge; a voxel's label is the most probable of
    :data:`TISSUES`.

    Args:
        size: voxels per edge, at most 192.

    Returns:
        The image, float32 ``[size, size, size, 1]`` with mean 0 and variance 1, and the labels,
        int32 ``[size, size, size]``.

    Raises:
        ConfigError: the size is out of range.
        TflmsError: nilearn is not installed.
    """
    if not 1 <= size <= LARGEST_SIZE:
        raise ConfigError(f"size is {size}; the brain comes in 1 to {LARGEST_SIZE} voxels an edge")
    image, grey, white = (_resampled(volume, size) for volume in _template())
    tissues = np.stack([1.0 - grey - white, grey, white])
    labels = np.argmax(tissues, axis=0).astype(np.int32)
    scaled = (image - image.mean()) / max(float(image.std()), 1e-6)
    return scaled[..., None].astype(np.float32), labels


def crop(image: Image, labels: Labels, *, size: int, seed: int) -> tuple[Image, Labels]:
    """Return a random cube out of a volume, mirrored at random along each axis.

    Args:
        image: float32 ``[x, y, z, channels]``.
        labels: int32 ``[x, y, z]``.
        size: voxels per edge of the cube.
        seed: the same seed gives the same cube.

    Raises:
        ConfigError: the volume is smaller than the cube.
    """
    if min(labels.shape) < size:
        raise ConfigError(f"a cube of {size} does not fit in a volume of {labels.shape}")
    random = np.random.RandomState(seed)
    starts = [random.randint(extent - size + 1) for extent in labels.shape]
    steps = [1 if random.randint(2) else -1 for _ in starts]
    box = tuple(slice(start, start + size) for start in starts)
    mirror = tuple(slice(None, None, step) for step in steps)
    return (
        np.ascontiguousarray(image[box][mirror]),
        np.ascontiguousarray(labels[box][mirror]),
    )


def crops(
    image: Image, labels: Labels, *, size: int, batch: int, seed: int = 0
) -> tuple[Image, Labels]:
    """Return a batch of random cubes: ``[batch, size, size, size, 1]`` and their labels."""
    pairs = [crop(image, labels, size=size, seed=seed * batch + i) for i in range(batch)]
    return np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs])


def slices(
    size: int, *, count: int, classes: int = 12, channels: int = 3, seed: int = 0
) -> tuple[Image, Labels]:
    """Return plane images of the brain and what they show, as a task for image classifiers.

    A class is a plane (sagittal, coronal, axial) and how deep along its axis the image was taken;
    each image is shifted, mirrored and given noise at random.

    Args:
        size: edge of the square images in pixels; above 192 they are enlarged.
        count: number of images.
        classes: number of labels, a multiple of 3.
        channels: 3 gives an image its two neighbours, 2 mm away, as the other colours; 1 the
            image alone.
        seed: the same seed gives the same images.

    Returns:
        Images, float32 ``[count, size, size, channels]``, and labels, int32 ``[count]``.

    Raises:
        ConfigError: ``classes`` is no multiple of 3, or ``channels`` neither 1 nor 3.
        TflmsError: nilearn is not installed.
    """
    if classes < 3 or classes % 3:
        raise ConfigError(f"classes is {classes}; three planes give a multiple of 3")
    if channels not in (1, 3):
        raise ConfigError(f"channels is {channels}; 1 and 3 are possible")
    volume = _template()[0]
    volume = (volume - volume.mean()) / volume.std()
    random = np.random.RandomState(seed)
    enlarge = _averaging(LARGEST_SIZE, size)
    depths = classes // 3
    low, high = LARGEST_SIZE // 6, LARGEST_SIZE - LARGEST_SIZE // 6
    images = np.empty([count, size, size, channels], np.float32)
    labels = random.randint(0, classes, [count]).astype(np.int32)
    for i, label in enumerate(labels):
        plane, depth = divmod(int(label), depths)
        place = int(low + (high - low) * (depth + random.uniform()) / depths)
        offsets = [0] if channels == 1 else [-2, 0, 2]
        planes = np.stack([np.moveaxis(volume, plane, 0)[place + d] for d in offsets], axis=-1)
        planes = np.roll(planes, random.randint(-8, 9, [2]), axis=(0, 1))
        if random.randint(2):
            planes = planes[::-1]
        for _ in range(2):  # each turn resizes the first axis and makes it the second
            planes = np.swapaxes(np.tensordot(enlarge, planes, axes=1), 0, 1)
        images[i] = planes + 0.1 * random.randn(*planes.shape)
    return images, labels


@functools.lru_cache(maxsize=1)
def _template() -> tuple[npt.NDArray[np.float32], ...]:
    """Return T1, grey and white matter in the cube around the brain, each from 0 to 1."""
    try:
        from nilearn import datasets
    except ImportError as error:
        raise TflmsError(
            "the brain volume comes with nilearn, which is not installed; "
            "run: pip install 'tflms[examples]'"
        ) from error
    loaders = (
        datasets.load_mni152_template,
        datasets.load_mni152_gm_template,
        datasets.load_mni152_wm_template,
    )
    volumes = [_values(load(resolution=1)) for load in loaders]
    inside = np.nonzero(volumes[0] > _BRAIN_INTENSITY)
    middle = [(int(axis.min()) + int(axis.max()) + 1) // 2 for axis in inside]
    return tuple(_cube(volume, middle) for volume in volumes)


def _values(image: Any) -> npt.NDArray[np.float32]:
    return np.asarray(image.get_fdata(dtype=np.float32))


def _cube(volume: npt.NDArray[np.float32], middle: list[int]) -> npt.NDArray[np.float32]:
    """Return the cube of the largest size around a point, zero outside the volume."""
    half = LARGEST_SIZE // 2
    padded = np.pad(volume, half)
    box = tuple(slice(place, place + LARGEST_SIZE) for place in middle)
    return padded[box]


def _resampled(cube: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    if size == LARGEST_SIZE:
        return cube
    weights = _averaging(LARGEST_SIZE, size)
    for _ in range(3):  # each turn averages the first axis and moves it to the end
        cube = np.tensordot(cube, weights, axes=([0], [1]))
    return cube


def _averaging(source: int, target: int) -> npt.NDArray[np.float32]:
    """Return the matrix ``[target, source]`` that averages a line of voxels over longer ones.

    Each target voxel covers ``source / target`` source voxels and weighs them by the overlap;
    a target finer than its source repeats it in the same way.
    """
    edges = np.linspace(0.0, source, target + 1)
    left = np.maximum(edges[:-1, None], np.arange(source)[None, :])
    right = np.minimum(edges[1:, None], np.arange(1, source + 1)[None, :])
    overlap = np.maximum(right - left, 0.0)
    weights: npt.NDArray[np.float32] = overlap / overlap.sum(axis=1, keepdims=True)
    return weights.astype(np.float32)
