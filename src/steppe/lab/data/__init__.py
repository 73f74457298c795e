"""Data sets by name, as batches that are reproducible to the bit."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

from steppe.lab.data.digits import digits
from steppe.lab.data.order import epoch_order, sequential_order
from steppe.lab.data.pipeline import Augmentation, Pipeline
from steppe.lab.data.split import Data, MemorySplit, Split
from steppe.lab.data.streams import generator, mix
from steppe.lab.data.subset import noisy, split_off

__all__ = [
    "Augmentation",
    "Data",
    "MemorySplit",
    "Pipeline",
    "Split",
    "epoch_order",
    "generator",
    "load",
    "mix",
    "names",
    "sequential_order",
]


def names() -> list[str]:
    """The data sets that `load` knows by name."""
    return ["digits"]


def load(
    name: str,
    *,
    root: Path | None = None,
    seed: int = 0,
    train_size: int | None = None,
    label_noise: float = 0.0,
    augment: tuple[str, ...] | None = None,
    validation: float = 0.0,
    **options: Any,
) -> Data:
    """The data set of this name."""
    if name != "digits":
        near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4) or names()
        raise ValueError(f"No data set is called {name!r}. Did you mean {', '.join(near)}?")
    data = digits((), train_size=train_size, seed=seed)
    if label_noise:
        data = with_label_noise(data, label_noise, seed=seed)
    if validation:
        data = with_validation(data, validation, seed=seed)
    return data


def with_label_noise(data: Data, fraction: float, *, seed: int) -> Data:
    """The data with a fraction of its training labels replaced; the test labels stay true."""
    targets = data.train.targets
    if targets is None or data.classes is None:
        raise ValueError(f"{data.name}: label_noise needs class labels that are known in advance.")
    import torch

    changed = noisy(targets, fraction, classes=data.classes, seed=seed)
    train = data.train.subset(torch.arange(len(targets)), changed)
    return data.noted(f"{fraction:.0%} of the training labels replaced at random", train=train)


def with_validation(data: Data, fraction: float, *, seed: int) -> Data:
    """The data with a part of the training split set aside as `validation`."""
    targets = data.train.targets
    if targets is None:
        raise ValueError(
            f"{data.name}: a validation split needs targets that are known in advance."
        )
    rest, chosen = split_off(targets, fraction, seed=seed)
    return replace(data, train=data.train.subset(rest), validation=data.train.subset(chosen))
