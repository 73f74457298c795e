"""Ranks: the processes that `torchrun` started, and what they tell each other during a run.

Rank 0 alone reads and writes run folders, shows progress and prints; the others take from it what
they need to know. In one process every exchange is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from steppe.distributed import process_group
from steppe.lab.errors import LabError
from steppe.lab.launch import rank_and_size

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """All ranks, and which of them this process is."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.size > 1

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; its error too."""
        if not self.several:
            return make()
        made: list[Any] = [None]
        with self.together():
            if self.leads:
                made = [make()]
        dist.broadcast_object_list(made, src=0)
        return made[0]  # type: ignore[no-any-return]

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error of one rank ends the block on all, so that no rank waits for one that is gone."""
        if not self.several:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except (LabError, OSError) as raised:  # a bug's traceback says more than agreement on it
            error = raised
        said = [text for text in self.gather(None if error is None else str(error)) if text]
        if said:
            shared = LabError(said[0])
            shared.shared = True  # every rank raises it, and only rank 0 need show it
            raise shared from error

    def gather(self, mine: T) -> list[T]:
        """What each rank has, in the order of ranks."""
        if not self.several:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on some rank."""
        if not self.several:
            return list(flags)
        message = torch.tensor([float(flag) for flag in flags], device=_message_device())
        dist.all_reduce(message, op=dist.ReduceOp.MAX)
        return [bool(value) for value in message.tolist()]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all ranks; on each the same bits."""
        if not self.several:
            return values
        message = values.to(_message_device())
        dist.all_reduce(message)
        return message.to(values.device) / self.size


@dataclass(frozen=True)
class Part:
    """The samples of each batch that this rank works on: one of so many contiguous slices."""

    number: int = 0
    of: int = 1

    def take(self, batch: Tensor) -> Tensor:
        """This part of a batch's indices.

        >>> Part(1, 2).take(torch.arange(5))
        tensor([2, 3, 4])
        """
        size = len(batch)
        return batch[self.number * size // self.of : (self.number + 1) * size // self.of]

    def share(self, mine: int, whole: int) -> float:
        """The factor on a mean over this part with which the mean over all parts is the batch's."""
        return mine * self.of / whole


def world() -> World:
    """This process among those of the process group, or alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    return World(dist.get_rank(), dist.get_world_size())


@contextmanager
def joined() -> Iterator[World]:
    """All processes that torchrun started as one process group, until the end of the block."""
    if rank_and_size()[1] < 2 or dist.is_initialized():
        yield world()
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        if local_rank() < torch.cuda.device_count():
            torch.cuda.set_device(local_rank())
    with process_group(backend):
        yield world()


def local_rank() -> int:
    """The number of this process on its machine: which GPU it takes."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _message_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
