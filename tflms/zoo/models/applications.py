"""The published image classifiers that Keras ships, without their trained weights."""

from __future__ import annotations

from typing import Any


def resnet50(image: int = 112, *, classes: int = 1000, seed: int = 0) -> Any:
    """Return ResNet-50 (He et al. 2016) for square colour images of ``image`` pixels."""
    return _untrained("ResNet50", image, classes, seed)


def densenet121(image: int = 112, *, classes: int = 1000, seed: int = 0) -> Any:
    """Return DenseNet-121 (Huang et al. 2017), whose concatenations keep every block's output."""
    return _untrained("DenseNet121", image, classes, seed)


def inception_v3(image: int = 128, *, classes: int = 1000, seed: int = 0) -> Any:
    """Return Inception-v3 (Szegedy et al. 2016); its images have at least 75 pixels an edge."""
    return _untrained("InceptionV3", image, classes, seed)


def mobilenet_v3(image: int = 112, *, classes: int = 1000, seed: int = 0) -> Any:
    """Return MobileNet-v3 large (Howard et al. 2019): depthwise convolutions, gates, dropout."""
    return _untrained("MobileNetV3Large", image, classes, seed)


def vgg16(image: int = 112, *, classes: int = 1000, seed: int = 0) -> Any:
    """Return VGG-16 (Simonyan and Zisserman 2015): a plain chain with three wide dense layers."""
    return _untrained("VGG16", image, classes, seed)


def _untrained(name: str, image: int, classes: int, seed: int) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    build = getattr(keras.applications, name)
    return build(
        weights=None,
        input_shape=(image, image, 3),
        classes=classes,
        classifier_activation=None,
    )
