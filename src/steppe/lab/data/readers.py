"""Data sets as splits: CIFAR, Fashion-MNIST and MNIST from their own files, and those of scikit-learn."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from steppe.lab.data.augment import Pipeline
from steppe.lab.data.order import mask, stratified
from steppe.lab.data.split import Data, MemorySplit
from steppe.lab.naming import library, unknown

# Mean and standard deviation per channel over all training pixels. "released" is what the paper's
# code has for both sets: CIFAR-10's mean, and the mean over images of each image's deviation.
NORMALISATION = {
    "cifar10": Pipeline(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
    "cifar100": Pipeline(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
    "released": Pipeline(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
}


def cifar(
    name: str, folder: Path, *, normalisation: str | None = None, downsample: int | None = None
) -> Data:
    """The training and test images as bytes in memory.

    `normalisation` takes other numbers ("cifar10", "cifar100", or "released": those of the
    paper's code); `downsample` averages the images to this size.
    """
    normalisation = name if normalisation is None else normalisation
    if normalisation not in NORMALISATION:
        raise unknown("normalisation", normalisation, NORMALISATION)
    parts, key, classes = (["train"], ["test"]), b"fine_labels", 100
    if name == "cifar10":
        batches = [f"data_batch_{k}" for k in range(1, 6)]
        parts, key, classes = (batches, ["test_batch"]), b"labels", 10
    splits, notes = [], []
    for part in parts:
        images, labels = read(folder, part, key)
        if downsample is not None:
            images = averaged(images, downsample)
        splits.append(MemorySplit(images, labels, NORMALISATION[normalisation]))
    if normalisation != name:
        notes.append(f"normalised with the numbers of {normalisation}")
    if downsample is not None:
        notes.append(f"averaged to {downsample}x{downsample}")
    shape = tuple(splits[0].inputs.shape[1:])
    train, test = splits
    return Data(name, train, test, classes=classes, shape=shape, note="; ".join(notes))


def file_content(folder: Path, name: str) -> bytes:
    """The content of a data set's file, which may be gzipped."""
    file, zipped = folder / name, folder / f"{name}.gz"
    if file.is_file():
        return file.read_bytes()
    if not zipped.is_file():
        raise FileNotFoundError(f"{folder} has no file {name}. Is the data set complete?")
    try:
        return gzip.decompress(zipped.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{zipped} is damaged ({error}). Fetch it again.") from error


def read(folder: Path, names: list[str], label_key: bytes) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) as bytes and labels from CIFAR's pickled batches."""
    images, labels = [], []
    for name in names:
        content = file_content(folder, name)
        try:
            batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
            images.append(torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32))
            labels += batch[label_key]
        except (KeyError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{folder}: {name} is not a batch of CIFAR images ({error}). Fetch it again."
            ) from error
    return torch.cat(images), torch.tensor(labels)


def averaged(images: Tensor, size: int) -> Tensor:
    """The images with each square of pixels replaced by its mean, rounded half up.

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
        if name == "_reconstruct":  # numpy 2 moved it; the old name still resolves but warns
            return numpy.empty(0).__reduce__()[0]
        return super().find_class(module, name)


def fashion_mnist(folder: Path) -> Data:
    """60,000 training and 10,000 test images of 28x28 in ten classes."""
    pipeline = Pipeline(mean=(0.2860,), std=(0.3530,))
    splits = []
    for prefix in ("train", "t10k"):
        names = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
        images, labels = (idx(file_content(folder, n), f"{folder}: {n}") for n in names)
        splits.append(MemorySplit(images.unsqueeze(1), labels.long(), pipeline))
    return Data("fashion-mnist", splits[0], splits[1], classes=10, shape=(1, 28, 28))


def idx(content: bytes, name: str) -> Tensor:
    """The bytes of an idx file as a tensor: 0, 0, 8 (bytes), dimensions, sizes, values.

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


def mnist(folder: Path) -> Data:
    """5,002 training and 4,998 test images of 28x28 in ten classes.

    The package has no test set. The first half of each digit's file is trained on and the second
    tested, whatever the seed: neighbours in a file are often by one writer.
    """
    halves: list[tuple[Tensor, Tensor]] = []
    for name in (f"src/digits/{digit}.json" for digit in range(10)):
        content = file_content(folder, name)
        try:
            values = torch.tensor(json.loads(content)["data"], dtype=torch.float64)
            images = values.mul(255).round().to(torch.uint8).view(-1, 1, 28, 28)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"{folder}: {name} is no list of images of 28x28 pixels ({error}). "
                "Unpack the package again."
            ) from error
        half = (len(images) + 1) // 2
        halves.append((images[:half], images[half:]))
    train, test = (
        MemorySplit(
            torch.cat(images),
            torch.arange(10).repeat_interleave(torch.tensor([len(each) for each in images])),
            Pipeline(mean=(0.1307,), std=(0.3081,)),
        )
        for images in zip(*halves, strict=True)
    )
    return Data("mnist", train, test, classes=10, shape=(1, 28, 28))


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


def table(name: str, *, train_size: int | None = None, seed: int = 0) -> Data:
    """Rows of numbers, half of them to train on.

    Inputs, and a regression's targets, are brought to mean 0 and standard deviation 1 with the
    training rows' numbers, so a mean squared error of 1 is what guessing the mean gives.
    """
    load = f"load_{name.replace('-', '_')}"
    bunch = getattr(library("sklearn.datasets", "'steppe[lab]'"), load)()
    rows, targets = torch.from_numpy(bunch.data), torch.from_numpy(bunch.target)
    size = len(rows) // 2 if train_size is None else train_size
    train = _training_mask(name, targets, size, seed)
    rows = _standardised(rows, train)
    regression = targets.is_floating_point()
    targets = _standardised(targets, train) if regression else targets.long()
    classes = None if regression else int(targets.max()) + 1
    note = f"{int(train.sum())} training samples of {len(rows)}, the rest test"
    return Data.divided(name, rows, targets, ~train, classes=classes, note=note)


def _standardised(values: Tensor, train: Tensor) -> Tensor:
    return ((values - values[train].mean(0)) / values[train].std(0)).to(torch.float32)


def _training_mask(name: str, targets: Tensor, size: int, seed: int) -> Tensor:
    if not 10 <= size < len(targets):
        raise ValueError(f"{name}: train_size must be 10 to {len(targets) - 1}, got {size}.")
    return mask(len(targets), stratified(targets, size, seed=seed))


BUILT_IN: dict[str, Callable[..., Data]] = {
    "digits": digits,
    **{name: partial(table, name) for name in ("diabetes", "breast-cancer", "wine")},
}
