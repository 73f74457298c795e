"""Decoding: image files to bytes of one size, at random for training, in the middle for test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steppe.lab.data.streams import generator

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
TRIES = 10
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Decoder:
    """Reads files as colour images (3, size, size): grey, palette and CMYK ones are converted.

    For training (`random_crop`, with a seed): a part of 8 to 100 % of the area with an aspect
    ratio of 3/4 to 4/3. Otherwise: the shorter side to `resize`, then the middle.
    """

    size: int = 224
    resize: int = 256
    random_crop: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ValueError(
                f"size must be at least 1 and at most resize, got size={self.size}, resize={self.resize}."
            )

    def batch(self, files: Sequence[str | Path], seed: int | None) -> Tensor:
        """The images of these files, (N, 3, size, size)."""
        if seed is None or not self.random_crop:
            return torch.stack([self.middle(opened(file)) for file in files])
        draws = torch.rand(len(files), TRIES, 4, generator=generator("crop", seed)).tolist()
        images = []
        for file, numbers in zip(files, draws, strict=True):
            image = opened(file)
            box = crop_box(image.width, image.height, numbers)
            images.append(pixels(image.resize((self.size, self.size), resample=2, box=box)))
        return torch.stack(images)

    def middle(self, image: Image.Image) -> Tensor:
        scale = self.resize / min(image.size)
        width, height = (max(self.resize, int(side * scale)) for side in image.size)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        resized = image.resize((width, height), resample=2)  # 2: bilinear
        return pixels(resized.crop((left, top, left + self.size, top + self.size)))


def crop_box(width: int, height: int, draws: list[list[float]]) -> Box:
    """The part of an image to train on; `draws` has four uniform numbers for each try.

    Area and (log) aspect ratio are uniform; a part that does not fit is drawn again, and after
    the last try the largest middle part with an allowed ratio is taken.
    """
    for area, ratio, across, down in draws:
        target = width * height * (0.08 + 0.92 * area)
        aspect = math.exp(math.log(3 / 4) + ratio * math.log(16 / 9))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def pillow() -> Any:
    """`PIL.Image`, or how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "Image folders and RandAugment need Pillow. Install it: pip install 'steppe[lab]'."
        ) from error
    return Image


def opened(file: str | Path) -> Image.Image:
    """The file's image in colour, decoded."""
    try:
        with pillow().open(file) as image:
            return image.convert("RGB")  # type: ignore[no-any-return]
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read as an image ({error}). Remove or replace it."
        ) from error


def pixels(image: Image.Image) -> Tensor:
    """(3, height, width) as bytes."""
    content = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return content.view(image.height, image.width, 3).permute(2, 0, 1)
