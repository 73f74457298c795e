"""scikit-learn's digits: 1,797 images of 8x8, built in, no download."""

from __future__ import annotations

import torch

from steppe.lab.data.split import Data, MemorySplit
from steppe.lab.data.subset import stratified

TRAIN_SIZE = 400  # small, so that plain training overfits and methods differ


def digits(*, train_size: int | None = None, seed: int = 0) -> Data:
    """A stratified training split of `train_size` images; all other images are the test split."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "The digits come with scikit-learn. Install it: pip install 'steppe[lab]'."
        ) from error
    bunch = load_digits()
    # Intensities are 0 to 16; as bytes they pass through the same pipeline as any image.
    images = torch.from_numpy(bunch.images).mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    size = TRAIN_SIZE if train_size is None else train_size
    if not 10 <= size < len(labels):
        raise ValueError(f"digits: train_size must be 10 to {len(labels) - 1}, got {size}.")
    train = torch.zeros(len(labels), dtype=torch.bool)
    train[stratified(labels, size, seed=seed)] = True
    return Data(
        name="digits",
        train=MemorySplit(images[train], labels[train]),
        test=MemorySplit(images[~train], labels[~train]),
        classes=10,
        shape=(1, 8, 8),
        note=f"{size} training images of {len(labels)}, the rest test",
    )
