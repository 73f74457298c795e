"""Subsets and label noise: what turns a data set into the one of an experiment."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.lab.data.streams import generator


def stratified(targets: Tensor, size: int, *, seed: int, key: str = "subset") -> Tensor:
    """`size` sorted indices whose class shares are those of `targets`, as nearly as counts allow.

    Floating-point targets have no classes; the subset is then plainly random.

    Examples:
        >>> targets = torch.tensor([0] * 60 + [1] * 30)
        >>> torch.bincount(targets[stratified(targets, 9, seed=0)]).tolist()
        [6, 3]
    """
    n = len(targets)
    if not 1 <= size <= n:
        raise ValueError(f"A subset of {n} samples must have 1 to {n} of them, got {size}.")
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


def split_off(targets: Tensor, fraction: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of what remains and of the stratified `fraction` that is split off."""
    if not 0 < fraction < 1:
        raise ValueError(f"The validation fraction must lie between 0 and 1, got {fraction}.")
    size = max(1, round(fraction * len(targets)))
    if size >= len(targets):
        raise ValueError(
            f"validation={fraction} of {len(targets)} training samples leaves nothing to train on."
        )
    chosen = stratified(targets, size, seed=seed, key="validation")
    left = torch.ones(len(targets), dtype=torch.bool)
    left[chosen] = False
    return left.nonzero().flatten(), chosen


def test_rows(targets: Tensor, fraction: float, *, seed: int) -> Tensor:
    """A mask of the stratified `fraction` of the samples that is the test split."""
    if not 0 < fraction < 1:
        raise ValueError(f"test must be between 0 and 1, got {fraction}.")
    count = max(1, round(fraction * len(targets)))
    if count >= len(targets):
        raise ValueError(f"{len(targets)} samples are too few to train on and to test on.")
    mask = torch.zeros(len(targets), dtype=torch.bool)
    mask[stratified(targets, count, seed=seed, key="test")] = True
    return mask


def noisy(targets: Tensor, fraction: float, *, classes: int, seed: int) -> Tensor:
    """The targets with exactly `round(fraction * n)` of them replaced by a random other class.

    Always another class, so that the fraction asked for is the fraction of wrong labels.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"label_noise must be in [0, 1], got {fraction}.")
    if targets.is_floating_point():
        raise ValueError("label_noise replaces class labels; these targets are real numbers.")
    draws = generator("label noise", seed)
    count = round(fraction * len(targets))
    chosen = torch.randperm(len(targets), generator=draws)[:count]
    shift = torch.randint(1, classes, (count,), generator=draws)
    replaced = targets.clone()
    replaced[chosen] = (targets[chosen] + shift) % classes
    return replaced
