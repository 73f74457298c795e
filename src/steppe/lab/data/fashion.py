"""Fashion-MNIST (Xiao et al. 2017) from its idx files, gzipped or not."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.lab.data.pipeline import Pipeline
from steppe.lab.data.split import Data, MemorySplit
from steppe.lab.data.store import Place

NORMALISATION = Pipeline(mean=(0.2860,), std=(0.3530,))


def fashion_mnist(place: Place) -> Data:
    """60,000 training and 10,000 test images of 28x28 in ten classes."""
    splits = []
    for prefix in ("train", "t10k"):
        names = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
        contents = zip(place.read(*names), names, strict=True)
        images, labels = (idx(content, f"{place.path}: {name}") for content, name in contents)
        splits.append(MemorySplit(images.unsqueeze(1), labels.long(), NORMALISATION))
    train, test = splits
    return Data("fashion-mnist", train, test, classes=10, shape=(1, 28, 28))


def idx(content: bytes, name: str) -> Tensor:
    """The bytes of an idx file as a tensor: 0, 0, 8 (bytes), dimensions, sizes, values.

    Examples:
        >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), "example")
        tensor([7, 8, 9], dtype=torch.uint8)
    """
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{name} is not an idx file of bytes: it begins with {content[:4]!r}.")
    dimensions = content[3]
    header = 4 + 4 * dimensions
    sizes = [int.from_bytes(content[4 + 4 * k : 8 + 4 * k], "big") for k in range(dimensions)]
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:]
    if len(values) != torch.Size(sizes).numel():
        raise ValueError(
            f"{name} promises {torch.Size(sizes).numel()} values and has {len(values)}. Fetch it again."
        )
    return values.view(sizes)
