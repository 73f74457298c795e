"""From stored bytes to a model's input: augmentations and normalisation, a whole batch at once."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from steppe.lab.data.order import generator
from steppe.lab.data.randaugment import RandAugment
from steppe.lab.naming import unknown


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
        batch = self._augment(batch, seed, after=False)
        floats = batch.to(torch.float32)
        if batch.dtype == torch.uint8:
            shape = (1, -1) + (1,) * (batch.dim() - 2)
            std = torch.tensor(self.std).view(shape)
            shift = torch.tensor(self.mean).view(shape) / std
            floats = floats.mul_(1 / (255 * std)).sub_(shift)  # (x / 255 - mean) / std
        return self._augment(floats, seed, after=True)

    def _augment(self, batch: Tensor, seed: int | None, *, after: bool) -> Tensor:
        chosen = [a for a in self.augmentations if a.after_normalisation is after]
        if seed is None or not chosen:
            return batch
        draws = generator("floats" if after else "bytes", seed)
        for augmentation in chosen:
            batch = augmentation(batch, draws)
        return batch


def check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}.")


@dataclass(frozen=True)
class Flip:
    """Mirror an image left to right."""

    probability: float = 0.5
    after_normalisation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_probability("flip: probability", self.probability)

    def __call__(self, images: Tensor, draws: torch.Generator) -> Tensor:
        chosen = (torch.rand(len(images), generator=draws) < self.probability).nonzero().flatten()
        return images.index_copy(0, chosen, images.index_select(0, chosen).flip(3))


@dataclass(frozen=True)
class Crop:
    """Pad an image with zeros and cut its size out again at a random place.

    `padding` None: an eighth of the image, 4 of 32 as in the paper.
    """

    padding: int | None = None
    after_normalisation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.padding is not None and self.padding < 0:
            raise ValueError(f"crop: padding must be at least 0, got {self.padding}.")

    def __call__(self, images: Tensor, draws: torch.Generator) -> Tensor:
        n, channels, height, width = images.shape
        pad = (min(height, width) + 4) // 8 if self.padding is None else self.padding
        padded = F.pad(images, (pad, pad, pad, pad))
        corner = torch.randint(0, 2 * pad + 1, (2, n, 1), generator=draws)
        rows = corner[0] + torch.arange(height)
        columns = corner[1] + torch.arange(width)
        # One flat index per pixel, shared by the channels: a gather is the fastest way measured.
        flat = (rows.unsqueeze(2) * (width + 2 * pad) + columns.unsqueeze(1)).view(n, 1, -1)
        return padded.flatten(2).gather(2, flat.expand(-1, channels, -1)).view_as(images)


@dataclass(frozen=True)
class Cutout:
    """Set a square to the mean colour (DeVries and Taylor 2017).

    The centre is uniform over the image, so the square may hang over the border. `size` None:
    half the image, 16 of 32 as in the paper. It works after normalisation, where the mean is 0.
    """

    size: int | None = None
    probability: float = 0.5
    after_normalisation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_probability("cutout: probability", self.probability)
        if self.size is not None and self.size < 1:
            raise ValueError(f"cutout: size must be at least 1, got {self.size}.")

    def __call__(self, images: Tensor, draws: torch.Generator) -> Tensor:
        n, _, height, width = images.shape
        size = min(height, width) // 2 if self.size is None else self.size
        chosen = torch.rand(n, 1, generator=draws) < self.probability
        # How far each row and column is from the first that is covered.
        rows, columns = (
            torch.arange(side) - (torch.randint(0, side, (n, 1), generator=draws) - size // 2)
            for side in (height, width)
        )
        covered = [(places >= 0) & (places < size) for places in (rows, columns)]
        # Times 0 or 1: faster than masked_fill, whose broadcast mask is walked one value at a time.
        square = (covered[0] & chosen).unsqueeze(2) & covered[1].unsqueeze(1)
        return images.mul_((~square).to(images.dtype).unsqueeze(1))


AUGMENTATIONS: dict[str, type[Flip | Crop | Cutout | RandAugment]] = {
    "flip": Flip,
    "crop": Crop,
    "cutout": Cutout,
    "randaugment": RandAugment,
}


def parse(text: str) -> Augmentation:
    """The augmentation that a text names, with its options behind a colon.

    >>> parse("cutout:size=8,probability=1")
    Cutout(size=8, probability=1)
    """
    name, _, rest = text.partition(":")
    if name not in AUGMENTATIONS:
        raise unknown("augmentation", name, AUGMENTATIONS)
    kind = AUGMENTATIONS[name]
    valid = [field.name for field in fields(kind)]
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in valid:
            raise unknown(f"option of {name}", key, valid)
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(f"{text!r}: {key} must be a number, got {value!r}.") from None
    return kind(**options)
