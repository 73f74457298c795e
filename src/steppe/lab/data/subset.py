"""Subsets and label noise: what turns a data set into the one of an experiment."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.lab.data.order import generator


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
