"""A split: samples that can be drawn as batches, and `Data`, the splits of one data set."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from steppe.analysis.problem import digest
from steppe.lab.data.augment import Pipeline, parse
from steppe.lab.data.order import mix

Task = tuple[Tensor, int | None]  # which samples, and the seed of their augmentation


class Split(ABC):
    """Samples with targets, drawn as batches in an order that the caller gives."""

    targets: Tensor | None
    """All targets in storage order, or None where only loading every sample would tell."""
    slow_to_load: ClassVar[bool] = True

    def relabelled(self, targets: Tensor) -> Split:
        """The same samples with other targets."""
        return replace(self, targets=targets)  # type: ignore[type-var]

    @abstractmethod
    def __len__(self) -> int: ...

    def digest(self) -> str:
        """Of all targets that are known, and of 64 samples spread over the split."""
        few = self.load((torch.arange(64) * len(self) // 64).unique(), None)
        return digest(few if self.targets is None else (*few, self.targets))

    @abstractmethod
    def subset(self, indices: Tensor) -> Split:
        """These samples only, in this order."""

    @abstractmethod
    def augmented(self, names: tuple[str, ...]) -> Split:
        """The same samples with these augmentations, in this order."""

    @abstractmethod
    def load(self, indices: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
        """A batch, augmented if there is a seed; where `slow_to_load`, a worker process does it."""

    def batches(
        self,
        order: Sequence[Tensor],
        *,
        augment_seed: int | None,
        start: int = 0,
        workers: int = 0,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One (x, y) per index tensor of `order`, beginning at `order[start]`.

        Augmented when `augment_seed` is given, with randomness that is a pure function of
        (augment_seed, position in order): a run resumed at `start=k` sees the same bits. The
        global random state is left alone. `workers` processes load ahead where loading takes time.
        """
        tasks = [
            (order[place], None if augment_seed is None else mix(augment_seed, place))
            for place in range(start, len(order))
        ]
        if not (workers and self.slow_to_load):
            yield from (self.load(*task) for task in tasks)
            return
        loader: DataLoader[Task] = DataLoader(
            tasks,  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=self._loaded,
            num_workers=workers,
            generator=torch.Generator(),  # else it draws its base seed from the global generator
        )
        iterator = iter(loader)
        try:
            yield from iterator
        finally:
            # After an error in a worker the traceback keeps the iterator alive, and the collector
            # that ends it at last waits five seconds for workers that got no word to stop.
            getattr(iterator, "_shutdown_workers", lambda: None)()

    def _loaded(self, task: Any) -> tuple[Tensor, Tensor]:
        return self.load(*task)


@dataclass(frozen=True)
class Data:
    """The splits of one data set, and what a model and a table need to know of them."""

    name: str
    train: Split
    test: Split
    validation: Split | None = None
    task: str = "classification"
    classes: int | None = None
    shape: tuple[int, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if self.task not in ("classification", "regression"):
            raise ValueError(f"task must be 'classification' or 'regression', got {self.task!r}.")
        if self.task == "classification" and (self.classes is None or self.classes < 2):
            raise ValueError(
                f"{self.name}: classification needs 2 or more classes, got {self.classes}."
            )

    @classmethod
    def divided(cls, name: str, x: Tensor, y: Tensor, test: Tensor, **about: Any) -> Data:
        """Samples in memory, those of the mask `test` being the test split."""
        train, rest = (MemorySplit(x[rows], y[rows]) for rows in (~test, test))
        task = "regression" if y.is_floating_point() else "classification"
        return cls(name, train, rest, task=task, shape=tuple(x.shape[1:]), **about)

    @functools.cached_property
    def digest(self) -> str:
        """Twelve hex digits that tell data sets apart."""
        splits = [split and split.digest() for split in (self.train, self.test, self.validation)]
        return hashlib.sha256(f"{self.name}{self.note}{splits}".encode()).hexdigest()[:12]

    def noted(self, note: str, **changes: Any) -> Data:
        """A changed copy whose note says what was changed."""
        return replace(self, note=f"{self.note}; {note}" if self.note else note, **changes)


@dataclass(frozen=True, eq=False)
class MemorySplit(Split):
    """Samples held in memory: images as bytes (N, C, H, W), or rows of numbers.

    Whole batches are cut, augmented and normalised at once, in the training process: a batch takes
    less time here than its way between two processes.
    """

    slow_to_load: ClassVar[bool] = False
    inputs: Tensor
    targets: Tensor
    pipeline: Pipeline = field(default_factory=Pipeline)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"inputs and targets must have one length, got {len(self.inputs)} and {len(self.targets)}."
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def digest(self) -> str:
        return digest((self.inputs, self.targets)) + repr(self.pipeline)

    def subset(self, indices: Tensor) -> MemorySplit:
        inputs = self.inputs.index_select(0, indices)
        return replace(self, inputs=inputs, targets=self.targets[indices])

    def augmented(self, names: tuple[str, ...]) -> MemorySplit:
        if names and (self.inputs.dtype != torch.uint8 or self.inputs.dim() != 4):
            raise ValueError(
                f"Augmentations ({', '.join(names)}) work on byte images (N, C, H, W), "
                f"got {self.inputs.dtype} of shape {tuple(self.inputs.shape)}. Use augment=()."
            )
        augmentations = tuple(parse(name) for name in names)
        return replace(self, pipeline=replace(self.pipeline, augmentations=augmentations))

    def load(self, indices: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
        return self.pipeline(self.inputs.index_select(0, indices), seed), self.targets[indices]
