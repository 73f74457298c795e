"""Data sets that come with scikit-learn: nothing to download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steppe.lab.data.split import Data
from steppe.lab.data.subset import mask, stratified


def digits(*, train_size: int | None = None, seed: int = 0) -> Data:
    """1,797 images of 8x8 in ten classes, 400 of them to train on.

    So few that SGD overfits and methods differ.
    """
    bunch = _sklearn_datasets().load_digits()
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
    return _table("diabetes", train_size, seed)


def breast_cancer(*, train_size: int | None = None, seed: int = 0) -> Data:
    """569 tumours with thirty measurements each, malignant or benign; half of them to train on."""
    return _table("breast-cancer", train_size, seed)


def wine(*, train_size: int | None = None, seed: int = 0) -> Data:
    """178 wines with thirteen measurements each, of three cultivars; half of them to train on."""
    return _table("wine", train_size, seed)


BUILT_IN = {
    "digits": digits,
    "diabetes": diabetes,
    "breast-cancer": breast_cancer,
    "wine": wine,
}


def _table(name: str, train_size: int | None, seed: int) -> Data:
    """Rows of numbers, standardised like a regression's targets with the training rows' numbers."""
    bunch = getattr(_sklearn_datasets(), f"load_{name.replace('-', '_')}")()
    rows, targets = torch.from_numpy(bunch.data), torch.from_numpy(bunch.target)
    size = len(rows) // 2 if train_size is None else train_size
    train = _training_mask(name, targets, size, seed)
    rows = _standardised(rows, train)
    regression = targets.is_floating_point()
    targets = _standardised(targets, train) if regression else targets.long()
    return Data.divided(
        name,
        rows,
        targets,
        ~train,
        classes=None if regression else int(targets.max()) + 1,
        note=f"{int(train.sum())} training samples of {len(rows)}, the rest test",
    )


def _standardised(values: Tensor, train: Tensor) -> Tensor:
    return ((values - values[train].mean(0)) / values[train].std(0)).to(torch.float32)


def _training_mask(name: str, targets: Tensor, size: int, seed: int) -> Tensor:
    if not 10 <= size < len(targets):
        raise ValueError(f"{name}: train_size must be 10 to {len(targets) - 1}, got {size}.")
    return mask(len(targets), stratified(targets, size, seed=seed))


def _sklearn_datasets() -> Any:
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            f"{' and '.join(BUILT_IN)} come with scikit-learn. Install it: pip install 'steppe[lab]'."
        ) from error
    return datasets
