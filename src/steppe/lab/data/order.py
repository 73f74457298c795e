"""The order in which an epoch visits the training data."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.lab.data.streams import generator


def epoch_order(
    n: int, batch: int, *, seed: int, epoch: int, stream: int = 0, drop_last: bool = False
) -> list[Tensor]:
    """One index tensor per batch: a fresh permutation of `n` samples, cut into batches.

    A pure function of its arguments, so epoch 7 can be had without epochs 0 to 6. `stream` 1 is
    an independent permutation of the same data: the second batch of a method that takes two per
    step. The last partial batch is kept, as in the paper, unless `drop_last`.

    Examples:
        >>> [len(b) for b in epoch_order(10, 4, seed=0, epoch=0)]
        [4, 4, 2]
    """
    if n < 1 or batch < 1:
        raise ValueError(f"n and batch must be at least 1, got n={n} and batch={batch}.")
    if drop_last and n < batch:
        raise ValueError(
            f"drop_last with batch={batch} leaves no batch of {n} samples. "
            f"Use a batch of at most {n} or keep the last batch."
        )
    order = torch.randperm(n, generator=generator("order", seed, epoch, stream))
    batches = list(torch.split(order, batch))
    return batches[:-1] if drop_last and len(batches[-1]) < batch else batches


def sequential_order(n: int, batch: int) -> list[Tensor]:
    """Batches in storage order, for evaluation.

    Examples:
        >>> sequential_order(3, 2)
        [tensor([0, 1]), tensor([2])]
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}.")
    return list(torch.split(torch.arange(n), batch)) if n else []
