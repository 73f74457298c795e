"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from their python archives or unpacked folders."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from steppe.lab.data.pipeline import Pipeline
from steppe.lab.data.split import Data, MemorySplit
from steppe.lab.data.store import Place
from steppe.lab.naming import unknown

# Mean and standard deviation per channel over all training pixels. "released" is what the paper's
# code has for both sets: CIFAR-10's mean, and the mean over images of each image's deviation.
NORMALISATION = {
    "cifar10": Pipeline(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
    "cifar100": Pipeline(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
    "released": Pipeline(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
}


@dataclass(frozen=True)
class Files:
    """Which files hold the splits, and under which key they hold the labels."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: bytes
    classes: int


CIFAR = {
    "cifar10": Files(
        tuple(f"data_batch_{k}" for k in range(1, 6)), ("test_batch",), b"labels", classes=10
    ),
    "cifar100": Files(("train",), ("test",), b"fine_labels", classes=100),
}


def cifar(
    name: str, place: Place, *, normalisation: str | None = None, downsample: int | None = None
) -> Data:
    """The training and test images as bytes in memory.

    `normalisation` takes other numbers ("cifar10", "cifar100", or "released": those of the
    paper's code); `downsample` averages the images to this size.
    """
    normalisation = name if normalisation is None else normalisation
    if normalisation not in NORMALISATION:
        raise unknown("normalisation", normalisation, NORMALISATION)
    files, pipeline = CIFAR[name], NORMALISATION[normalisation]
    splits, notes = [], []
    for part in (files.train, files.test):
        images, labels = read(place, part, files.labels)
        if downsample is not None:
            images = averaged(images, downsample)
        splits.append(MemorySplit(images, labels, pipeline))
    if normalisation != name:
        notes.append(f"normalised with the numbers of {normalisation}")
    if downsample is not None:
        notes.append(f"averaged to {downsample}x{downsample}")
    train, test = splits
    shape = tuple(train.inputs.shape[1:])
    note = "; ".join(notes)
    return Data(name, train, test, classes=files.classes, shape=shape, note=note)


def read(place: Place, names: tuple[str, ...], label_key: bytes) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) as bytes and labels from CIFAR's pickled batches."""
    images, labels = [], []
    for name, content in zip(names, place.read(*names), strict=True):
        try:
            batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
            images.append(torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32))
            labels += batch[label_key]
        except (KeyError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{place.path}: {name} is not a batch of CIFAR images ({error}). Fetch it again."
            ) from error
    return torch.cat(images), torch.tensor(labels)


def averaged(images: Tensor, size: int) -> Tensor:
    """The images with each square of pixels replaced by its mean, rounded half up.

    Examples:
        >>> averaged(torch.tensor([[[[0, 4], [4, 6]]]], dtype=torch.uint8), 1).item()
        4
    """
    height, width = images.shape[2:]
    if size < 1 or height % size or width % size:
        raise ValueError(f"downsample must divide the image size {height}x{width}, got {size}.")
    square = height // size, width // size
    parts = torch.split(images, 1000)  # a whole CIFAR as floats would be 600 MB
    return torch.cat(
        [F.avg_pool2d(part.to(torch.float32), square).add_(0.5).to(torch.uint8) for part in parts]
    )


class _Unpickler(pickle.Unpickler):
    """Only arrays, lists and strings: a pickle from elsewhere must not run code."""

    ALLOWED = frozenset({
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which CIFAR has no use for")
        # numpy 2 moved numpy.core; the old name still resolves but warns.
        return super().find_class(_numpy_core() if name == "_reconstruct" else module, name)


def _numpy_core() -> str:
    import numpy

    return "numpy._core.multiarray" if hasattr(numpy, "_core") else "numpy.core.multiarray"
