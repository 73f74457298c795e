"""RandAugment (Cubuk et al. 2020) on whole batches of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from steppe.lab.data import operations

LEVELS = 30  # magnitudes are on a scale of 0 to 30
BLENDS = {
    "brightness": operations.brightness,
    "colour": operations.colour,
    "contrast": operations.contrast,
    "sharpness": operations.sharpness,
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
        images = images.clone()
        for _ in range(self.count):
            chosen = torch.randint(len(OPERATIONS), (len(images),), generator=draws)
            sign = 1 - 2 * torch.randint(2, (len(images),), generator=draws)
            for k, name in enumerate(OPERATIONS[1:], start=1):
                members = (chosen == k).nonzero().flatten()
                if len(members):
                    part = images.index_select(0, members)
                    images.index_copy_(0, members, apply(name, part, self.strength, sign[members]))
        return images

    @property
    def strength(self) -> float:
        return self.magnitude / LEVELS


def apply(name: str, images: Tensor, strength: float, sign: Tensor) -> Tensor:
    """One named operation at a strength in [0, 1], with the direction of each image."""
    if name in BLENDS:
        return BLENDS[name](images, (1 + 0.9 * strength * sign).to(torch.float32))
    if name in MOVES:
        return operations.affine(images, matrices(name, images, strength, sign))
    if name == "posterize":
        return operations.posterize(images, 8 - round(4 * strength))
    if name == "solarize":
        return operations.solarize(images, 255 * (1 - strength))
    if name == "autocontrast":
        return operations.autocontrast(images)
    return operations.equalize(images)


def matrices(name: str, images: Tensor, strength: float, sign: Tensor) -> Tensor:
    """The affine matrix of each image for one of `MOVES`."""
    height, width = images.shape[2:]
    table = []
    for way in (-1, 1):
        matrix = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        if name == "rotate":
            matrix = operations.rotation(way * 30 * strength, height, width)
        elif name == "shear-x":
            matrix[1] = way * 0.3 * strength
        elif name == "shear-y":
            matrix[3] = way * 0.3 * strength
        elif name == "translate-x":
            matrix[2] = way * 0.45 * strength * width
        else:
            matrix[5] = way * 0.45 * strength * height
        table.append(matrix)
    return torch.tensor(table, dtype=torch.float64)[(sign > 0).long()]
