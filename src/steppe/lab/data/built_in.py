"""Data sets that come with scikit-learn: nothing to download."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.lab.data.split import Data
from steppe.lab.data.subset import mask, stratified
from steppe.lab.naming import library


def digits(*, train_size: int | None = None, seed: int = 0) -> Data:
    """1,797 images of 8x8 in ten classes, 400 of them to train on.

    So few that SGD overfits and methods differ.
    """
    bunch = library("sklearn.datasets", "'steppe[lab]'").load_digits()
    # Intensities are 0 to 16; as bytes they pass through the same pipeline as any image.
    images = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    train = _training_mask("digits", labels, 400 if train_size is None else train_size, seed)
    note = f"{int(train.sum())} training images of {len(labels)}, the rest test"
    return Data.divided("digits", images, labels, ~train, classes=10, note=note)


def diabetes(*, train_size: int | None = None, seed: int = 0) -> Data:
    """442 patients with ten measurements each and the progress of their illness: a regression.

    Half of them to train on. Inputs and targets are brought to mean 0 and standard deviation 1
    with the training patients' numbers, so a mean squared error of 1 is what guessing the mean
    gives.
    """
    bunch = library("sklearn.datasets", "'steppe[lab]'").load_diabetes()
    rows, progress = torch.from_numpy(bunch.data), torch.from_numpy(bunch.target)
    train = _training_mask("diabetes", progress, 221 if train_size is None else train_size, seed)
    rows, progress = (
        ((v - v[train].mean(0)) / v[train].std(0)).to(torch.float32) for v in (rows, progress)
    )
    note = f"{int(train.sum())} training samples of {len(rows)}, the rest test"
    return Data.divided("diabetes", rows, progress, ~train, note=note)


BUILT_IN = {"digits": digits, "diabetes": diabetes}


def _training_mask(name: str, targets: Tensor, size: int, seed: int) -> Tensor:
    if not 10 <= size < len(targets):
        raise ValueError(f"{name}: train_size must be 10 to {len(targets) - 1}, got {size}.")
    return mask(len(targets), stratified(targets, size, seed=seed))
