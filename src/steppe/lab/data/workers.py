"""Loading in worker processes: one batch per task, in order, with isolated randomness."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from steppe.lab.data.streams import mix

Task = tuple[Tensor, int | None]  # which samples, and the seed of their augmentation


class BatchSource(Protocol):
    """Loads a whole batch; pickled to the workers where they are not forked."""

    def load(self, indices: Tensor, seed: int | None) -> Any: ...


class _Tasks(Dataset[Any]):
    def __init__(self, source: BatchSource) -> None:
        self.source = source

    def __getitem__(self, task: Task) -> Any:
        return self.source.load(*task)


def batch_tasks(order: Sequence[Tensor], *, augment_seed: int | None, start: int) -> list[Task]:
    """The batches of `order[start:]`, each with its seed.

    The seed depends on the batch's place in the whole order alone, so neither the number of
    workers nor the place where a resumed run starts changes anything.
    """
    if start < 0:
        raise ValueError(f"start must be at least 0, got {start}.")
    return [
        (order[place], None if augment_seed is None else mix(augment_seed, place))
        for place in range(start, len(order))
    ]


def run_tasks(source: BatchSource, tasks: list[Task], workers: int) -> Iterator[Any]:
    """What `source.load` gives for each task, in order, loaded here or ahead by processes."""
    if workers < 0:
        raise ValueError(f"workers must be at least 0, got {workers}.")
    if not workers:
        yield from (source.load(*task) for task in tasks)
        return
    loader = DataLoader(
        _Tasks(source),
        batch_size=None,
        sampler=tasks,
        num_workers=workers,
        generator=torch.Generator(),  # else it draws its base seed from the global generator
    )
    iterator = iter(loader)
    try:
        yield from iterator
    finally:
        # After an error in a worker the traceback keeps the iterator alive, and the collector
        # that ends it at last waits five seconds for workers that were never told to stop.
        getattr(iterator, "_shutdown_workers", lambda: None)()


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """torch's, Python's and numpy's global generators seeded inside, as they were outside."""
    numpy: Any = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed & 0xFFFFFFFF)
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])
