"""From stored bytes to a model's input: augmentations and normalisation, a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from steppe.lab.data.streams import generator


class Augmentation(Protocol):
    """A random change of a batch of images, with every draw taken from the given generator.

    The batch is the pipeline's own copy: it may be changed in place.
    """

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

    def __call__(self, batch: Tensor, seed: int | None) -> Tensor:
        """The model's input for a batch; `seed` is None in evaluation."""
        return self.finish(self.augment(batch, seed), seed)

    def augment(self, batch: Tensor, seed: int | None) -> Tensor:
        """The part that works on bytes; a folder's worker processes do it."""
        return self._apply(batch, seed, after=False)

    def finish(self, batch: Tensor, seed: int | None) -> Tensor:
        """The part that gives floats: normalisation and what comes after it."""
        return self._apply(self.normalise(batch), seed, after=True)

    def _apply(self, batch: Tensor, seed: int | None, *, after: bool) -> Tensor:
        chosen = [a for a in self.augmentations if a.after_normalisation is after]
        if seed is None or not chosen:
            return batch
        draws = generator("floats" if after else "bytes", seed)
        for augmentation in chosen:
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
