"""Means over parts of unequal size, with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
