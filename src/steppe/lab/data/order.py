"""Random choices about data (order, subsets, label noise): each is a pure function of its keys.

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

    >>> tuple(len(b) for b in epoch_order(10, 4, seed=0, epoch=0))
    (4, 4, 2)
    """
    if n < 1 or batch < 1:
        raise ValueError(f"n and batch must be at least 1, got n={n} and batch={batch}.")
    if drop_last and n < batch:
        raise ValueError(
            f"drop_last leaves nothing to train on: there are {n} samples, fewer than a batch of "
            f"{batch}. Set drop_last=false or a smaller batch."
        )
    order = torch.randperm(n, generator=generator("order", seed, epoch, stream))
    batches = list(torch.split(order, batch))
    return batches[:-1] if drop_last and len(batches[-1]) < batch else batches


def sequential_order(n: int, batch: int) -> list[Tensor]:
    """Batches in storage order, for evaluation."""
    return list(torch.arange(n).split(batch)) if n else []


def stratified(targets: Tensor, size: int, *, seed: int, key: str = "subset") -> Tensor:
    """`size` sorted indices whose class shares are those of `targets`, as nearly as counts allow.

    Floating-point targets have no classes; the subset is then plainly random.

    >>> targets = torch.tensor([0] * 60 + [1] * 30)
    >>> torch.bincount(targets[stratified(targets, 9, seed=0)]).tolist()
    [6, 3]
    """
    n = len(targets)
    shuffled = torch.randperm(n, generator=generator(key, seed))
    if targets.is_floating_point():
        return shuffled[:size].sort().values
    # A sample's place within its class, divided by the class's size: the samples with the
    # smallest share are taken first, so every class is filled at the same rate.
    labels = targets[shuffled]
    share = torch.empty(n, dtype=torch.float64)
    for label in set(labels.tolist()):
        members = labels == label
        count = int(members.sum())
        share[members] = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return shuffled[share.argsort(stable=True)[:size]].sort().values


def mask(n: int, chosen: Tensor) -> Tensor:
    """Which of `n` samples are among the chosen indices."""
    return torch.zeros(n, dtype=torch.bool).index_fill_(0, chosen, True)


def held_out(targets: Tensor, fraction: float, *, seed: int, key: str) -> Tensor:
    """A mask of the stratified `fraction` of the samples that is set aside; `key` says for what."""
    n = len(targets)
    if not 0 < fraction < 1:
        raise ValueError(f"{key} must be between 0 and 1, got {fraction}.")
    size = max(1, round(fraction * n))
    if size >= n:
        raise ValueError(f"{key}={fraction} of {n} samples leaves nothing to train on.")
    return mask(n, stratified(targets, size, seed=seed, key=key))


def noisy(targets: Tensor, fraction: float, *, classes: int, seed: int) -> Tensor:
    """The targets with exactly `round(fraction * n)` of them replaced by a random other class.

    Always another class, so that the fraction asked for is the fraction of wrong labels.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"label_noise must be in [0, 1], got {fraction}.")
    draws = generator("label noise", seed)
    count = round(fraction * len(targets))
    chosen = torch.randperm(len(targets), generator=draws)[:count]
    shift = torch.randint(1, classes, (count,), generator=draws)
    replaced = targets.clone()
    replaced[chosen] = (targets[chosen] + shift) % classes
    return replaced
