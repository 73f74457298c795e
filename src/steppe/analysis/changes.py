"""Changes that deployment makes to a model or to what it sees: rounding, pruning, noise, blur."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import prune

from steppe.analysis.directions import filter_norms
from steppe.noise import Draw, standard_normal_
from steppe.schedules import check_nonnegative, check_share


@dataclass(frozen=True)
class Change:
    """No change; base of the others, whose first field says how strong they are.

    `scheme` is how it is applied. Neither function writes to what it is given.
    """

    kind: ClassVar[str] = "none"
    random: ClassVar[bool] = False
    """Whether it differs from draw to draw."""

    def __post_init__(self) -> None:
        for first in fields(self)[:1]:
            check_nonnegative(first.name, getattr(self, first.name))

    @property
    def size(self) -> float:
        return float(next((getattr(self, f.name) for f in fields(self)), 0.0))

    @property
    def scheme(self) -> str:
        return ""

    def weights(self, weights: Sequence[Tensor], draw: Draw) -> list[Tensor]:
        """The weights after the change."""
        return list(weights)

    def inputs(self, x: Tensor, first: int, scale: Tensor, draw: Draw) -> Tensor:
        """Inputs after the change; `first` is the number of the first sample among all of them,
        `scale` the standard deviation of each channel or feature."""
        return x


@dataclass(frozen=True)
class Rounding(Change):
    """Weights rounded to nearest on `2^(bits-1) - 1` levels on each side of zero.

    Symmetric: `step = max|w| / (2^(bits-1) - 1)`, one step for each filter, each tensor, or each
    group of so many neighbours in a filter. 2 bits are three levels, -1, 0 and 1.
    """

    bits: int
    per: Literal["filter", "tensor"] | int = "filter"
    kind: ClassVar[str] = "rounding"

    def __post_init__(self) -> None:
        if not (isinstance(self.bits, int) and 2 <= self.bits <= 32):
            raise ValueError(f"bits must be a whole number from 2 to 32, got {self.bits!r}.")
        if self.per not in ("filter", "tensor") and (type(self.per) is not int or self.per < 1):
            raise ValueError(f'per must be "filter", "tensor" or a group size, got {self.per!r}.')

    @property
    def scheme(self) -> str:
        return f"group of {self.per}" if isinstance(self.per, int) else f"per {self.per}"

    def weights(self, weights: Sequence[Tensor], draw: Draw) -> list[Tensor]:
        return [rounded(w, self.bits, self.per) for w in weights]


def rounded(weight: Tensor, bits: int, per: Literal["filter", "tensor"] | int) -> Tensor:
    """One tensor, rounded as `Rounding` says.

    >>> rounded(torch.tensor([[3.0, -1.6, 0.4]]), 3, "filter")
    tensor([[ 3., -2.,  0.]])
    """
    rows = weight.double().reshape(1 if per == "tensor" or weight.ndim < 2 else len(weight), -1)
    length = rows.shape[1]
    if isinstance(per, int):
        rows = F.pad(rows, (0, -length % per)).unflatten(1, (-1, per))
    step = rows.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    step = torch.where(step == 0, 1.0, step)
    whole = ((rows / step).round() * step).reshape(len(rows), -1)[:, :length]
    return whole.reshape(weight.shape).to(weight.dtype)


@dataclass(frozen=True)
class Pruning(Change):
    """The smallest weights set to zero: this share of each tensor, or of all tensors together.

    The masks are `torch.nn.utils.prune`'s (`l1_unstructured`, `global_unstructured`).
    """

    amount: float
    scope: Literal["tensor", "global"] = "tensor"
    kind: ClassVar[str] = "pruning"

    def __post_init__(self) -> None:
        check_share("amount", self.amount)
        if self.scope not in ("tensor", "global"):
            raise ValueError(f'scope must be "tensor" or "global", got {self.scope!r}.')

    @property
    def scheme(self) -> str:
        return "global" if self.scope == "global" else "per tensor"

    def weights(self, weights: Sequence[Tensor], draw: Draw) -> list[Tensor]:
        if self.scope == "tensor":
            return [_pruned(w.reshape(-1), float(self.amount)).view(w.shape) for w in weights]
        flat = _pruned(torch.cat([w.reshape(-1) for w in weights]), float(self.amount))
        parts = flat.split([w.numel() for w in weights])
        return [part.reshape(w.shape) for part, w in zip(parts, weights, strict=True)]


def _pruned(weight: Tensor, amount: float) -> Tensor:
    mask = prune.L1Unstructured(amount).compute_mask(weight, torch.ones_like(weight))
    return torch.where(mask == 0, 0.0, weight)


@dataclass(frozen=True)
class TwoOfFour(Change):
    """Of every four weights along dimension 1 (the inputs) the two smallest set to zero.

    Tensors whose dimension 1 is no multiple of four stay dense, as they do on GPUs.
    """

    kind: ClassVar[str] = "2:4 pruning"

    size = 0.5

    def weights(self, weights: Sequence[Tensor], draw: Draw) -> list[Tensor]:
        found = list(weights)
        for i, w in enumerate(found):
            if w.ndim > 1 and w.shape[1] % 4 == 0:
                fours = w.movedim(1, -1).unflatten(-1, (-1, 4))
                small = fours.abs().topk(2, -1, largest=False).indices
                found[i] = fours.scatter(-1, small, 0.0).flatten(-2).movedim(-1, 1)
        return found


@dataclass(frozen=True)
class WeightNoise(Change):
    """Gaussian noise that displaces each filter by about `ratio` times its norm, as RWP does.

    `std_j = ratio ‖w_j‖ / sqrt(d_j)` for a filter of d_j weights. The noise is a function of seed,
    draw and place; the global generator is not used.
    """

    ratio: float
    kind: ClassVar[str] = "weight noise"
    random: ClassVar[bool] = True

    def weights(self, weights: Sequence[Tensor], draw: Draw) -> list[Tensor]:
        seed_of = draw.block_seeds(len(weights))
        moved = []
        for number, w in enumerate(weights):
            z = _normal(w, seed_of(number))
            count = w.numel() // len(w) if w.ndim > 1 else w.numel()
            std = draw.sign * self.ratio / math.sqrt(count) * filter_norms(w)
            moved.append((w + z * std).to(w.dtype))
        return moved


@dataclass(frozen=True)
class InputNoise(Change):
    """Gaussian noise on the inputs, `level` standard deviations of each channel or feature."""

    level: float
    kind: ClassVar[str] = "input noise"
    random: ClassVar[bool] = True

    def inputs(self, x: Tensor, first: int, scale: Tensor, draw: Draw) -> Tensor:
        # Each sample has its own seed: the noise does not depend on the micro-batches.
        seed_of = draw.block_seeds(2**20)
        noise = torch.stack([_normal(s, seed_of(first + i)) for i, s in enumerate(x)])
        return x.add((noise * scale).to(x.dtype), alpha=draw.sign * self.level)


@dataclass(frozen=True)
class Blur(Change):
    """Images blurred by a Gaussian with a standard deviation of so many pixels."""

    pixels: float
    kind: ClassVar[str] = "blur"

    def inputs(self, x: Tensor, first: int, scale: Tensor, draw: Draw) -> Tensor:
        if self.pixels == 0:
            return x
        reach = math.ceil(3 * self.pixels)
        at = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
        kernel = torch.exp(-(at**2) / (2 * self.pixels**2))
        kernel /= kernel.sum()
        planes = F.pad(x.reshape(-1, 1, *x.shape[2:]), [reach] * 4, mode="replicate")
        planes = F.conv2d(F.conv2d(planes, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))
        return planes.reshape(x.shape)


@dataclass(frozen=True)
class Contrast(Change):
    """Images pulled towards their own mean: `mean + factor (x - mean)` in each channel."""

    factor: float
    kind: ClassVar[str] = "contrast"

    def inputs(self, x: Tensor, first: int, scale: Tensor, draw: Draw) -> Tensor:
        return x.mean((2, 3), keepdim=True).lerp(x, self.factor)


def input_scale(x: Tensor) -> Tensor:
    """The standard deviation of each feature of a table, each channel of images, else of all."""
    if x.ndim in (2, 4):
        across = [d for d in range(x.ndim) if d != 1]
        return x.double().std(across, correction=0, keepdim=True)[0]
    return x.double().std(correction=0)


def words(kind: str, size: float, scheme: str) -> str:
    """A change as tables name it.

    >>> words("rounding", 4.0, "per filter"), words("pruning", 0.5, "global")
    ('4 bits, per filter', '50 % pruned, global')
    """
    known = {
        "none": "none",
        "rounding": f"{size:g} bits, {scheme}",
        "pruning": f"{100 * size:g} % pruned, {scheme}",
        "2:4 pruning": "2:4 pruned",
        "blur": f"blur of {size:g} pixel{'s' * (size != 1)}",
        "contrast": f"contrast x {size:g}",
    }
    return known.get(kind, f"{kind} {size:g}")


def _normal(like: Tensor, seed: int) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return standard_normal_(torch.empty(like.shape, dtype=dtype, device=like.device), seed)
