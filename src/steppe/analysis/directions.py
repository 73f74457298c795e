"""Directions in weight space, random and adversarial, and means over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from steppe.analysis.replica import Replica


def random_like(weights: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Standard normal tensors, a function of the seed and the shapes alone."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w) for w in weights]


def filter_norms(weight: Tensor) -> Tensor:
    """The norm of each slice along dimension 0, shaped to multiply; a vector or scalar is one filter.

    >>> filter_norms(torch.tensor([[3.0, 4.0]]))
    tensor([[5.]])
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


def sam_direction(
    replica: Replica, rows: slice, scales: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], float]:
    """SAM's ascent direction at the centre for these samples, and how steep the loss is along it.

    The direction `v` has `‖v / c‖ = 1` with scales `c` (1 by default): `v = c² g / ‖c g‖`, and the
    slope is `‖c g‖`. Where the gradient vanishes every direction is as good: a fixed random one.
    """
    replica.place(replica.centre)
    _, gradient = replica.gradient(rows)
    return _steepest(gradient, scales)


def ascend(
    replica: Replica,
    rows: slice,
    rho: float,
    steps: int,
    *,
    start: list[Tensor],
    scales: Sequence[Tensor] | None = None,
) -> float:
    """The largest loss that projected gradient ascent finds in `‖eps / c‖ <= rho`.

    From `rho * start`, a unit direction: `steps` steps of length rho along the normalised
    gradient, each projected back into the ball. The best point seen counts.
    """
    eps = [rho * v for v in start]
    losses = []
    for _ in range(steps):
        replica.offset(eps)
        loss, gradient = replica.gradient(rows)
        losses.append(loss)
        uphill, _ = _steepest(gradient, scales)
        moved = [e.add(v, alpha=rho) for e, v in zip(eps, uphill, strict=True)]
        # Where the scale is 0 nothing moves: 0 / 0 counts as 0.
        inverse = None if scales is None else [torch.where(c > 0, 1 / c, 0.0) for c in scales]
        size = length(scaled(moved, inverse))
        eps = [e * min(1.0, rho / size) for e in moved] if size > 0 else moved
    replica.offset(eps)
    losses.append(replica.evaluate(rows)[0])
    # A NaN is the worst loss there is, and `max` keeps it.
    return torch.tensor(losses, dtype=torch.float64).max().item()


def _steepest(
    gradient: Sequence[Tensor], scales: Sequence[Tensor] | None
) -> tuple[list[Tensor], float]:
    uphill = scaled(gradient, scales)
    slope = length(uphill)
    if slope == 0:
        uphill = scaled(random_like(gradient, seed=0), scales)
    return [v / length(uphill) for v in scaled(uphill, scales)], slope


def scaled(tensors: Sequence[Tensor], scales: Sequence[Tensor] | None) -> list[Tensor]:
    """Each tensor times its scale, if there are any."""
    if scales is None:
        return list(tensors)
    return [t * c for t, c in zip(tensors, scales, strict=True)]
