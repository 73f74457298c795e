"""Directions in weight space, and means over directions or parts of the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def random_like(weights: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Standard normal tensors, a function of the seed and the shapes alone."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w) for w in weights]


def filter_norms(weight: Tensor) -> Tensor:
    """The norm of each slice along dimension 0, shaped to multiply; a vector or scalar is one filter.

    Examples:
        >>> filter_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor([[5.],
                [2.]])
    """
    across = tuple(range(1, weight.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(weight, dim=across, keepdim=across is not None)
    return norms


def filter_normalised(weights: Sequence[Tensor], seed: int) -> list[Tensor]:
    """A random direction whose filters have the norms of the weights' filters; 0 for vectors.

    `d_j = z_j ‖w_j‖ / ‖z_j‖`: nets that differ by rescaled layers show the same surface.
    """
    return [
        z * (filter_norms(w) / filter_norms(z)) if w.ndim > 1 else torch.zeros_like(w)
        for w, z in zip(weights, random_like(weights, seed), strict=True)
    ]


def length(direction: Sequence[Tensor]) -> float:
    """The Euclidean norm over all tensors."""
    return math.sqrt(sum(d.double().square().sum().item() for d in direction))


def unit(direction: Sequence[Tensor]) -> list[Tensor]:
    """The direction scaled to norm one."""
    norm = length(direction)
    return [d / norm for d in direction]


def orthonormal(weights: Sequence[Tensor], count: int, seed: int) -> list[list[Tensor]]:
    """`count` random orthonormal directions, which cover the space more evenly than independent ones."""
    draws = [random_like(weights, seed + i) for i in range(count)]
    columns = [torch.cat([z.reshape(-1).double().cpu() for z in draw]) for draw in draws]
    return [unflatten(row, weights) for row in torch.linalg.qr(torch.stack(columns, 1))[0].T]


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of a flat vector in the shapes, types and devices of these tensors."""
    pieces = torch.split(vector, [t.numel() for t in like])
    return [piece.reshape(t.shape).to(t) for piece, t in zip(pieces, like, strict=True)]


def weighted_mean(rows: Tensor, sizes: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The mean over dimension 0 weighed by size, and its standard error (NaN for one row).

    Examples:
        >>> weighted_mean(torch.tensor([1.0, 3.0, 5.0]), [1, 1, 2])[0]
        tensor(3.5000)
    """
    n = len(rows)
    weights = torch.tensor(sizes, dtype=rows.dtype) / sum(sizes)
    weights = weights.reshape(-1, *[1] * (rows.ndim - 1))
    mean = (weights * rows).sum(0)
    if n == 1:
        return mean, torch.full_like(mean, math.nan)
    return mean, ((weights * (rows - mean)).square().sum(0) * n / (n - 1)).sqrt()
