"""Small nets: a multilayer perceptron, and convolutions for seconds per epoch on 28x28 images."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from steppe.lab.models.layers import image_shape, initialised, scaled
from steppe.lab.models.resnet import normed


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


def small_conv(
    classes: int,
    shape: tuple[int, ...],
    width: float = 1.0,
    *,
    channels: Sequence[int] = (16, 32, 64),
) -> nn.Sequential:
    """3x3 convolutions with BatchNorm, halving the image between them, then mean and linear."""
    inputs, height, side = image_shape("small-conv", shape)
    if min(height, side) < 2 ** (len(channels) - 1):
        raise ValueError(f"small-conv halves the image {len(channels) - 1} times; got {shape}.")
    layers: list[nn.Module] = []
    for k, outputs in enumerate(scaled(c, width) for c in channels):
        if k:
            layers.append(nn.MaxPool2d(2))
        layers += normed(inputs, outputs, 3)
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return initialised(nn.Sequential(*layers))
