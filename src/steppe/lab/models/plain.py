"""Nets without shortcuts: a multilayer perceptron, convolutions for seconds per epoch on 28x28 images,
and VGG16 with BatchNorm (Simonyan and Zisserman 2015) in CIFAR's and ImageNet's form."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from steppe.lab.models.layers import image_shape, initialised, is_small, scaled
from steppe.lab.models.resnet import normed

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
LARGE_MAP = 7  # ImageNet's form averages its features to 7x7


def mlp(
    classes: int,
    shape: tuple[int, ...],
    width: float = 1.0,
    *,
    hidden: Sequence[int] = (128, 128),
    dropout: float = 0.0,
) -> nn.Sequential:
    """Linear layers with ReLU between them, over the flattened input."""
    layers: list[nn.Module] = [nn.Flatten()]
    size = math.prod(shape)
    for units in (scaled(units, width) for units in hidden):
        layers += [nn.Linear(size, units), nn.ReLU(inplace=True)]
        if dropout:
            layers.append(nn.Dropout(dropout))
        size = units
    return initialised(nn.Sequential(*layers, nn.Linear(size, classes)))


def small_conv(classes: int, shape: tuple[int, ...], width: float = 1.0) -> nn.Sequential:
    """3x3 convolutions with BatchNorm, halving the image between them, then mean and linear."""
    inputs, height, side = image_shape("small-conv", shape)
    if min(height, side) < 4:
        raise ValueError(f"small-conv halves the image 2 times; got {shape}.")
    first, second, third = (scaled(channels, width) for channels in (16, 32, 64))
    layers = [*normed(inputs, first, 3), nn.MaxPool2d(2)]
    layers += [*normed(first, second, 3), nn.MaxPool2d(2), *normed(second, third, 3)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(third, classes)]
    return initialised(nn.Sequential(*layers))


def vgg16_bn(
    classes: int,
    shape: tuple[int, ...],
    width: float = 1.0,
    *,
    hidden: int | None = None,
    dropout: float = 0.5,
) -> nn.Sequential:
    """Thirteen 3x3 convolutions, each with BatchNorm, and a classifier.

    `hidden` units in each of the classifier's two hidden layers: 4096 for ImageNet; 0 for small
    images, where the classifier is one linear layer (14.7 M parameters with ten classes).
    """
    inputs, height, side = image_shape("vgg16-bn", shape)
    small = is_small(shape)
    size = min(height, side)
    layers: list[nn.Module] = []
    for stage in STAGES:
        for channels in (scaled(c, width) for c in stage):
            layers += [
                nn.Conv2d(inputs, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
            ]
            inputs = channels
        if size >= 2:  # an image under 32x32 is down to one pixel before the last stage
            layers.append(nn.MaxPool2d(2))
            size //= 2
    side = 1 if small else LARGE_MAP
    layers += [nn.AdaptiveAvgPool2d(side), nn.Flatten()]
    units = (0 if small else 4096) if hidden is None else hidden
    inputs *= side**2
    for size in [scaled(units, width)] * 2 if units else []:
        layers += [nn.Linear(inputs, size), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        inputs = size
    return initialised(nn.Sequential(*layers, nn.Linear(inputs, classes)))
