"""The user's own data: tensors or datasets, from Python or from `module:function`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from steppe.lab.data.split import Data, MemorySplit, Split

Source = Any
"""A Split, a pair (inputs, targets) of tensors or arrays, a map-style dataset, or a DataLoader."""


@dataclass(frozen=True, eq=False)
class DatasetSplit(Split):
    """A map-style dataset that gives (x, y) for an index.

    Whatever it draws from torch's, Python's or numpy's global generators is seeded for each batch
    and undone after it, so its own augmentation is as reproducible as ours.
    """

    dataset: Dataset[Any]
    indices: Tensor
    targets: Tensor | None = None
    collate: Callable[[list[Any]], Any] = default_collate

    def __len__(self) -> int:
        return len(self.indices)

    def subset(self, indices: Tensor) -> DatasetSplit:
        targets = None if self.targets is None else self.targets[indices]
        return replace(self, indices=self.indices[indices], targets=targets)

    def augmented(self, names: tuple[str, ...]) -> DatasetSplit:
        if names:
            raise ValueError(
                f"A dataset of your own augments its samples itself, got augment={names}. "
                "Give tensors of bytes (N, C, H, W) to use steppe's augmentations."
            )
        return self

    def load(self, indices: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
        with isolated(0 if seed is None else seed):
            samples = [self.dataset[k] for k in self.indices[indices].tolist()]
        for sample in samples:
            if not isinstance(sample, tuple | list) or len(sample) < 2:
                kind = type(sample).__name__
                raise TypeError(f"samples of a dataset must be pairs (x, y), got a {kind}.")
        x, y = self.collate([sample[:2] for sample in samples])
        return as_float32(x), as_float32(y if self.targets is None else self.targets[indices])


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """torch's, Python's and numpy's global generators seeded inside, as they were outside."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


def wrap(
    train: Source,
    test: Source,
    validation: Source | None = None,
    *,
    name: str = "own data",
    classes: int | None = None,
) -> Data:
    """`Data` from pairs of tensors or arrays, map-style datasets, DataLoaders, or splits.

    Floating-point targets mean regression. The class count is read from the targets, or from a
    dataset's `classes`, unless given. Of a DataLoader the dataset and the collate function are
    used: batches are drawn by the lab, in an order that the seed fixes.

    >>> data = wrap((torch.randn(8, 3), torch.randn(8)), (torch.randn(4, 3), torch.randn(4)))
    >>> data.task, data.shape, len(data.train)
    ('regression', (3,), 8)
    """
    splits = [as_split(source, name) for source in (train, test)]
    held_out = None if validation is None else as_split(validation, name)
    for part, split in zip(("training", "test", "validation"), (*splits, held_out), strict=True):
        if split is not None and not len(split):
            raise ValueError(f"{name}: the {part} split is empty.")
    x, y = next(splits[0].batches([torch.tensor([0])], augment_seed=None))
    task = "regression" if y.is_floating_point() else "classification"
    if task == "classification" and classes is None:
        classes = class_count([train, test], splits, name)
    return Data(name, splits[0], splits[1], held_out, task, classes, shape=tuple(x.shape[1:]))


def as_float32(values: Tensor) -> Tensor:
    """Floats of any size as float32 (Python's and numpy's are float64); other types as they are."""
    return values.to(torch.float32) if values.is_floating_point() else values


def plain(values: Any) -> Any:
    """What torch makes a tensor of; of a table of pandas its array."""
    known = isinstance(values, Tensor | numpy.ndarray | list | tuple)
    return values if known or not hasattr(values, "__array__") else numpy.array(values)


WANTED = (
    "((x_train, y_train), (x_test, y_test)) with tensors or arrays, (train, test) with datasets or "
    "DataLoaders, or a third part for validation"
)


def as_data(given: Any, name: str = "own data") -> Data:
    """`Data` of whatever the user gives: a `Data`, or a tuple of two or three splits."""
    if isinstance(given, Data):
        return given
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        if all(isinstance(part, Tensor) or hasattr(part, "__array__") for part in given):
            raise TypeError(f"data must have a training and a test split: {WANTED}.")
        return wrap(*given, name=name)
    hint = ""
    if isinstance(given, Dataset | DataLoader):
        hint = " torch.utils.data.random_split divides one dataset."
    raise TypeError(f"data must be {WANTED}; got {type(given).__name__}.{hint}")


def as_split(source: Source, name: str) -> Split:
    """A split of whatever the user has."""
    collate: Callable[[list[Any]], Any] = default_collate
    if isinstance(source, DataLoader):
        _refuse_own_order(source, name)
        collate, source = source.collate_fn, source.dataset
    if isinstance(source, Split):
        return source
    if isinstance(source, TensorDataset) and collate is default_collate:
        source = source.tensors
    if isinstance(source, tuple | list) and len(source) == 2:
        part: Any = None
        try:
            inputs, targets = (torch.as_tensor(plain(part := each)) for each in source)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name}: inputs and targets must be numbers, got {type(part).__name__} ({error})."
            ) from error
        if targets.is_floating_point():
            return MemorySplit(inputs, targets.to(torch.float32))
        column = targets.dim() == 2 and targets.shape[1] == 1
        return MemorySplit(inputs, (targets.flatten() if column else targets).to(torch.int64))
    indexed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if not indexed or isinstance(source, IterableDataset | Tensor | tuple | list):
        raise TypeError(
            f"{name}: a split must be a pair (inputs, targets) of tensors or arrays, a dataset with "
            f"__len__ and __getitem__, or a DataLoader of one; got {type(source).__name__}."
        )
    return DatasetSplit(source, torch.arange(len(source)), known_labels(source), collate)


def _refuse_own_order(loader: DataLoader[Any], name: str) -> None:
    """Nothing of a sampler of its own would be kept: the dataset must say all."""
    usual = (RandomSampler, SequentialSampler, type(None))
    for part, bad in (
        (loader.dataset, isinstance(loader.dataset, IterableDataset)),
        (loader.sampler, not isinstance(getattr(loader, "sampler", None), usual)),
    ):
        if bad:
            raise TypeError(
                f"{name}: batches are drawn by the lab, so that a DataLoader's {type(part).__name__} "
                "would be ignored. Give a dataset with __len__ and __getitem__."
            )


def known_labels(dataset: Any) -> Tensor | None:
    """The targets of a dataset where they can be had without loading every sample."""
    if isinstance(dataset, Subset):
        whole = known_labels(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        return dataset.tensors[1]
    known = getattr(dataset, "targets", None)
    return None if known is None else torch.as_tensor(known)


def class_count(sources: list[Source], splits: list[Split], name: str) -> int:
    """How many classes the targets, or a dataset's own list, have."""
    targets = [split.targets for split in splits]
    if all(t is not None for t in targets):
        return 1 + max(int(t.max()) for t in targets if t is not None)
    for source in sources:
        classes = getattr(getattr(source, "dataset", source), "classes", None)  # or of a loader's
        if classes is not None:
            return len(classes)
    raise ValueError(
        f"{name}: how many classes are there? Give the dataset an attribute `targets` or "
        "`classes`, or use steppe.lab.data.wrap(train, test, classes=…)."
    )
