"""Widths and initial weights: one stated rule per family, drawn from torch's global generator.

Convolution nets and MLPs: convolutions He-normal over the fan-out for ReLU (He et al. 2015) with
zero biases, norms 1 and 0, linear layers torch's own uniform in ±1/sqrt(fan-in). Vision
transformers: linear layers and embeddings truncated normal with std .02, biases 0, the patch
embedding truncated normal with std 1/sqrt(fan-in).
"""

from __future__ import annotations

import math
from typing import TypeVar

from torch import nn

T = TypeVar("T", bound=nn.Module)
SMALL_IMAGE = 64  # up to this size: CIFAR's form of a network, above it ImageNet's


def initialised(model: T) -> T:
    """A new convolution net or MLP with its initial weights (norms have theirs from torch)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            module.reset_parameters()
    return model


def initialise_transformer(model: nn.Module) -> None:
    """Give a vision transformer's layers their initial weights (its embeddings are its own)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fan_in = module.weight[0].numel()
            std = 0.02 if isinstance(module, nn.Linear) else 1 / math.sqrt(fan_in)
            nn.init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def scaled(channels: int, width: float) -> int:
    """Channels times the width multiplier, at least one.

    >>> scaled(64, 0.25), scaled(512, 0.25), scaled(64, 0.001)
    (16, 128, 1)
    """
    if not width > 0:
        raise ValueError(f"width must be above 0, got {width}.")
    return max(1, round(channels * width))


def image_shape(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width) of the images a network is built for."""
    if len(shape) != 3:
        raise ValueError(
            f"{model} takes images, so shape must be (channels, height, width); got {shape}. "
            "For rows of numbers use the model 'mlp'."
        )
    return shape[0], shape[1], shape[2]


def is_small(shape: tuple[int, ...]) -> bool:
    """Whether images of this shape get a 3x3 stem without pooling."""
    return max(shape[1:]) <= SMALL_IMAGE
