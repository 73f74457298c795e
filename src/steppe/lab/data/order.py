"""Random choices about data: each is a pure function of its keys.

Nothing here reads or writes torch's global generator, so data never disturbs a model's dropout
or initialisation, and a resumed run needs no saved generator state: the keys are enough.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def mix(*keys: int | str) -> int:
    """One 63-bit seed from several keys; any change of a key gives an unrelated seed.

    >>> mix("order", 0, 1) == mix("order", 0, 1), mix("order", 0, 1) == mix("order", 1, 0)
    (True, False)
    """
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    # torch's CPU generator keeps the low 32 bits of a seed, hence a hash and not a sum of keys.
    return int.from_bytes(digest, "little") >> 1


def generator(*keys: int | str) -> torch.Generator:
    """A fresh CPU generator for these keys."""
    return torch.Generator().manual_seed(mix(*keys))


def epoch_order(
    n: int, batch: int, *, seed: int, epoch: int, stream: int = 0, drop_last: bool = False
) -> list[Tensor]:
    """One index tensor per batch: a fresh permutation of `n` samples, cut into batches.

    `stream` 1 is an independent permutation of the same data: the second batch of a method that
    takes two per step. The last partial batch is kept, as in the paper, unless `drop_last`.

    >>> [len(b) for b in epoch_order(10, 4, seed=0, epoch=0)]
    [4, 4, 2]
    """
    if n < 1 or batch < 1:
        raise ValueError(f"n and batch must be at least 1, got n={n} and batch={batch}.")
    if drop_last and n < batch:
        raise ValueError(
            f"drop_last leaves no batch of {n} samples, fewer than a batch of {batch}. Set "
            "drop_last=false or a smaller batch."
        )
    order = torch.randperm(n, generator=generator("order", seed, epoch, stream))
    batches = list(torch.split(order, batch))
    return batches[:-1] if drop_last and len(batches[-1]) < batch else batches


def sequential_order(n: int, batch: int) -> list[Tensor]:
    """Batches in storage order, for evaluation."""
    return list(torch.arange(n).split(batch)) if n else []
