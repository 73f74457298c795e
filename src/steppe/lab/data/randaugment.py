"""RandAugment (Cubuk et al. 2020) with Pillow's operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

LEVELS = 30  # magnitudes are on a scale of 0 to 30
BLENDS = {
    "brightness": "Brightness",
    "colour": "Color",
    "contrast": "Contrast",
    "sharpness": "Sharpness",
}
MOVES = ("rotate", "shear-x", "shear-y", "translate-x", "translate-y")
OPERATIONS = ("identity", "autocontrast", "equalize", "posterize", "solarize", *BLENDS, *MOVES)


@dataclass(frozen=True)
class RandAugment:
    """`count` operations per image, drawn from fourteen, all at one `magnitude` of 0 to 30.

    The paper's list of operations. At magnitude m = magnitude / 30: turn by 30 m degrees, shear
    by .3 m, move by .45 m of the image (each either way, nearest pixel, black outside), blend at
    1 ± .9 m, keep 8 - round(4 m) bits, invert from 255 (1 - m) on.
    """

    count: int = 2
    magnitude: int = 14
    after_normalisation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"randaugment: count must be at least 0, got {self.count}.")
        if not 0 <= self.magnitude <= LEVELS:
            raise ValueError(f"randaugment: magnitude must be 0 to {LEVELS}, got {self.magnitude}.")

    def __call__(self, images: Tensor, draws: torch.Generator) -> Tensor:
        arrays = images.movedim(1, 3).contiguous()
        last = 3 if images.shape[1] == 1 else 4  # Pillow's grey images have no channel axis
        pictures = [Image.fromarray(a) for a in arrays.flatten(last - 1).numpy()]
        for _ in range(self.count):
            chosen = torch.randint(len(OPERATIONS), (len(images),), generator=draws)
            sign = 1 - 2 * torch.randint(2, (len(images),), generator=draws)
            plan = zip(pictures, chosen.tolist(), sign.tolist(), strict=True)
            pictures = [apply(OPERATIONS[k], p, self.magnitude / LEVELS, way) for p, k, way in plan]
        changed = torch.from_numpy(np.stack([np.asarray(p) for p in pictures]))
        return changed.view_as(arrays).movedim(3, 1).contiguous()


def apply(name: str, image: Any, strength: float, way: int) -> Any:
    """An image after one named operation at a strength in [0, 1], in the direction 1 or -1."""
    far = strength * way
    if name == "identity":
        return image
    if name in BLENDS:
        return getattr(ImageEnhance, BLENDS[name])(image).enhance(1 + 0.9 * far)
    if name == "rotate":
        return image.rotate(30 * far)
    if name == "posterize":
        return ImageOps.posterize(image, 8 - round(4 * strength))
    if name == "solarize":
        return ImageOps.solarize(image, 255 * (1 - strength))  # type: ignore[arg-type]
    if name not in MOVES:
        return getattr(ImageOps, name)(image)
    matrix = {
        "shear-x": (1, 0.3 * far, 0, 0, 1, 0),
        "shear-y": (1, 0, 0, 0.3 * far, 1, 0),
        "translate-x": (1, 0, 0.45 * far * image.width, 0, 1, 0),
        "translate-y": (1, 0, 0, 0, 1, 0.45 * far * image.height),
    }[name]
    return image.transform(image.size, Image.Transform.AFFINE, matrix)
