"""Widths: how a family of networks is made narrower, and which images count as small."""

from __future__ import annotations

SMALL_IMAGE = 64  # up to this size: CIFAR's form of a network, above it ImageNet's


def scaled(channels: int, width: float) -> int:
    """Channels times the width multiplier, at least one.

    Examples:
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
