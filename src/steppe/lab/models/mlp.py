"""Multilayer perceptron: for digits and for rows of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from steppe.lab.models.initial import initialised
from steppe.lab.models.widths import scaled


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
