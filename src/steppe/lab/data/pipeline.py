"""From stored bytes to a model's input: augmentations and normalisation, a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Augmentation(Protocol):
    """A random change of a batch, with every draw taken from the given generator."""

    @property
    def after_normalisation(self) -> bool:
        """Whether it works on the normalised floats instead of the bytes."""

    def __call__(self, images: Tensor, draws: torch.Generator) -> Tensor: ...


@dataclass(frozen=True)
class Pipeline:
    """Augment (in training), scale bytes to [0, 1], subtract `mean`, divide by `std`.

    Inputs that are not bytes are only cast to float32: their scale is the user's business.
    """

    augmentations: tuple[Augmentation, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __call__(self, batch: Tensor, draws: torch.Generator | None) -> Tensor:
        """The model's input for a batch; `draws` is None in evaluation."""
        if draws is None:
            return self.normalise(batch)
        for augmentation in self.augmentations:
            if not augmentation.after_normalisation:
                batch = augmentation(batch, draws)
        batch = self.normalise(batch)
        for augmentation in self.augmentations:
            if augmentation.after_normalisation:
                batch = augmentation(batch, draws)
        return batch

    def normalise(self, batch: Tensor) -> Tensor:
        """(x / 255 - mean) / std per channel for bytes; float32 for anything else."""
        if batch.dtype != torch.uint8:
            return batch.to(torch.float32)
        shape = (1, -1) + (1,) * (batch.dim() - 2)
        std = torch.tensor(self.std).view(shape)
        shift = torch.tensor(self.mean).view(shape) / std
        return batch.to(torch.float32).mul_(1 / (255 * std)).sub_(shift)
