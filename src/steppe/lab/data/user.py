"""The user's own data: tensors or datasets, from Python or from `module:function`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from steppe.lab.data.split import Data, MemorySplit, Split
from steppe.lab.data.workers import isolated

Source = Any  # a Split, an (inputs, targets) pair of tensors or arrays, or a map-style dataset


@dataclass(frozen=True, eq=False)
class DatasetSplit(Split):
    """A map-style dataset that gives (x, y) for an index.

    Whatever it draws from torch's, Python's or numpy's global generators is seeded for each batch
    and undone after it, so its own augmentation is as reproducible as ours.
    """

    dataset: Dataset[Any]
    indices: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def targets(self) -> Tensor | None:
        return self.labels

    def subset(self, indices: Tensor) -> DatasetSplit:
        labels = None if self.labels is None else self.labels[indices]
        return replace(self, indices=self.indices[indices], labels=labels)

    def relabelled(self, targets: Tensor) -> DatasetSplit:
        return replace(self, labels=targets)

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
        x, y = default_collate([sample[:2] for sample in samples])
        return as_float32(x), as_float32(y if self.labels is None else self.labels[indices])


def wrap(
    train: Source,
    test: Source,
    validation: Source | None = None,
    *,
    name: str = "own data",
    classes: int | None = None,
) -> Data:
    """`Data` from splits, pairs of tensors, or map-style datasets.

    Floating-point targets mean regression. The class count is read from the targets, or from a
    dataset's `classes`, unless given.

    Examples:
        >>> data = wrap((torch.randn(8, 3), torch.randn(8)), (torch.randn(4, 3), torch.randn(4)))
        >>> data.task, data.shape, len(data.train)
        ('regression', (3,), 8)
    """
    splits = [as_split(source, name) for source in (train, test)]
    held_out = None if validation is None else as_split(validation, name)
    x, y = next(splits[0].batches([torch.tensor([0])], augment_seed=None))
    task = "regression" if y.is_floating_point() else "classification"
    if task == "classification" and classes is None:
        classes = class_count([train, test], splits, name)
    return Data(
        name, splits[0], splits[1], held_out, task=task, classes=classes, shape=tuple(x.shape[1:])
    )


def as_float32(values: Tensor) -> Tensor:
    """Floats of any size as float32 (Python's and numpy's are float64); other types as they are."""
    return values.to(torch.float32) if values.is_floating_point() else values


def as_split(source: Source, name: str) -> Split:
    """A split of whatever the user has."""
    if isinstance(source, Split):
        return source
    if isinstance(source, TensorDataset):
        source = source.tensors
    if isinstance(source, tuple | list) and len(source) == 2:
        inputs, targets = (torch.as_tensor(part) for part in source)
        real = targets.is_floating_point()
        return MemorySplit(inputs, targets.to(torch.float32 if real else torch.int64))
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        known = getattr(source, "targets", None)
        labels = None if known is None else torch.as_tensor(known)
        return DatasetSplit(source, torch.arange(len(source)), labels)
    raise TypeError(
        f"{name}: a split must be a pair of tensors (inputs, targets) or a dataset with "
        f"__len__ and __getitem__, got {type(source).__name__}."
    )


def class_count(sources: list[Source], splits: list[Split], name: str) -> int:
    """How many classes the targets, or a dataset's own list, have."""
    targets = [split.targets for split in splits]
    if all(t is not None for t in targets):
        return 1 + max(int(t.max()) for t in targets if t is not None)
    for source in sources:
        if hasattr(source, "classes"):
            return len(source.classes)
    raise ValueError(
        f"{name}: how many classes are there? Give the dataset an attribute `targets` or "
        "`classes`, or use steppe.lab.data.wrap(train, test, classes=…)."
    )


def from_function(name: str, function: Callable[..., Any], options: dict[str, Any]) -> Data:
    """What the user's function returns for these options, as `Data`."""
    result = function(**options)
    if isinstance(result, Data):
        return result
    if isinstance(result, tuple | list) and len(result) in (2, 3):
        return wrap(*result, name=name)
    raise TypeError(
        f"{name} must return (train, test), (train, test, validation) or a Data, "
        f"got {type(result).__name__}."
    )
