"""Gaussian noise that is a pure function of where and when it is used.

A filter is a slice along dimension 0 of a parameter with two or more dimensions; a vector or scalar
parameter is one filter. Noise belongs to places in the full parameters: a block of it is a run of whole
filters, sorted by their length. Each block seeds its own generator from (seed, step, stream, replica,
block), so there is nothing but seed and step to save, the global random state is never touched, and the
noise is the same whatever the number of threads, ranks or shards.
"""

from __future__ import annotations

import math
import numbers
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from steppe.distributed import local

if TYPE_CHECKING:
    from steppe.frozen import FrozenLinear

T = TypeVar("T")
Gradients: TypeAlias = Sequence[Tensor | None]

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

VERSION = 2
"""Raised when a seed comes to mean other noise."""

CPU_BLOCK = 2**15
"""Weights per block on the CPU: torch works serially up to this size, so blocks drawn by several
threads do not fight over torch's own threads, and a block stays in the cache until it is used."""

DEVICE_BLOCK = 2**22
"""Weights per block elsewhere: few kernel launches."""

PARALLEL_FROM = 2**17
"""Fewer weights than this are drawn by the calling thread alone."""


def check_seed(seed: object) -> None:
    """Raise unless it is a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed must be an int, got {seed!r}.")


@dataclass(frozen=True)
class Draw:
    """Which noise: everything that two draws must differ in to be independent."""

    seed: int
    step: int
    stream: int = 0
    """Passes with the same stream share their noise."""
    replica: int = 0
    """The data-parallel replica that draws, 0 where all share one eps."""
    sign: float = 1.0

    def block_seeds(self, blocks: int) -> Callable[[int], int]:
        """Seeds of the blocks: different for different blocks, streams and replicas of a step.

        torch's CPU generator keeps 32 bits of a seed, so the seeds of one step are a keyed
        bijection of 32-bit counters: no two blocks of a step can collide by accident.
        """
        key = _mix64(_mix64(self.seed & _MASK64) ^ (self.step & _MASK64))
        first = ((self.replica << 12) + self.stream) * blocks

        def seed_of(block: int) -> int:
            h = (first + block) & _MASK32
            h ^= key & _MASK32
            h ^= h >> 16
            h = (h * 0x85EBCA6B + (key >> 32)) & _MASK32
            h ^= h >> 13
            h = (h * 0xC2B2AE35) & _MASK32
            return h ^ (h >> 16)

        return seed_of


def _mix64(z: int) -> int:
    """SplitMix64: neighbouring seeds and steps give unrelated keys."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """What norms over tensors of these dtypes are computed in: 64 bits if any has them, else 32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def filter_squares(tensor: Tensor) -> Tensor:
    """‖·‖² of each filter of one tensor, in at least 32 bits."""
    rows = local(tensor).reshape(len(tensor) if tensor.dim() > 1 else 1, -1)
    return rows.to(torch.promote_types(tensor.dtype, torch.float32)).square().sum(1)


class Perturbed:
    """One perturbed parameter and its place among all filters."""

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        first: int,
        offset: tuple[int, ...],
        always: bool = False,
        layer: FrozenLinear | None = None,
    ) -> None:
        self.name, self.param, self.offset = name, param, offset
        """`offset`: where this rank's part begins, in each dimension of the full parameter."""
        self.shape, self.dtype, self.device = param.shape, param.dtype, param.device
        """The full parameter's, as they were when steppe was attached."""
        count = (param.shape[0] if param.dim() > 1 else 1) if param.numel() else 0
        self.filter_count, self.filters = count, slice(first, first + count)
        self.length = param.numel() // max(1, count)  # weights per filter
        self.always = always
        """Perturbed also where frozen: nothing trains it."""
        self.layer = layer
        """What computes with noise out of place while the parameter is frozen."""

    @property
    def active(self) -> bool:
        """In training, frozen parameters are never touched, whenever they were frozen."""
        return self.always or self.param.requires_grad

    @property
    def noisy(self) -> bool:
        """Whether it is perturbed, in place or out of place."""
        return self.active or self.layer is not None

    @property
    def values(self) -> Tensor:
        """The values that this rank holds, as a tensor to write in place."""
        return local(self.param.detach())

    def check_unconverted(self) -> None:
        was, now = ((x.dtype, x.device, tuple(x.shape)) for x in (self, self.param))
        if was != now:
            before, after = (
                f"{dtype} on {device}, {shape}," for dtype, device, shape in (was, now)
            )
            raise RuntimeError(
                f"{self.name} was {before} when steppe was attached and is {after} now. Convert the "
                "model first (model.to(), .double(), .cuda()) and attach after that; now detach() and "
                "attach again."
            )


class Stretch(NamedTuple):
    """Filters of one full parameter, first to last, and where they lie in a block of noise."""

    owner: Perturbed
    first: int
    last: int
    start: int
    stop: int


def noise_blocks(params: Sequence[Perturbed]) -> list[list[Stretch]]:
    """Cut parameters, in this order, into blocks of whole filters."""
    limit = CPU_BLOCK if params[0].device.type == "cpu" else DEVICE_BLOCK
    blocks: list[list[Stretch]] = [[]]
    for p in params:
        first = 0
        while first < p.filter_count:
            used = blocks[-1][-1].stop if blocks[-1] else 0
            room = (limit - used) // p.length
            if used and not room:
                blocks.append([])
                continue
            last = min(p.filter_count, first + max(1, room))
            blocks[-1].append(Stretch(p, first, last, used, used + (last - first) * p.length))
            first = last
    return blocks


def runs_of(rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(number, length) of rows, neighbours of one length taken together."""
    runs: list[tuple[int, int]] = []
    for number, length in rows:
        before = runs.pop()[0] if runs and runs[-1][1] == length else 0
        runs.append((before + number, length))
    return runs


def matrices(flat: Tensor, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Flat memory as one matrix for each run of rows of one length."""
    pieces = flat.split([math.prod(run) for run in runs])
    return [piece.view(run) for piece, run in zip(pieces, runs, strict=True)]


class Member:
    """What this rank holds of a parameter, and where in flat memory it goes."""

    def __init__(self, owner: Perturbed, start: int) -> None:
        values = self.values = owner.values
        self.owner, self.start = owner, start
        many, strides = values.dim() > 1, values.stride()
        self.rows = values.shape[0] if many else 1
        self.length = values.numel() // max(1, self.rows)
        self.first = owner.offset[0] if many else 0
        """The first of the parameter's filters that this rank holds any part of."""
        inner = sorted(range(1, values.dim()), key=lambda d: -strides[d])
        self.regular = (values.permute(0, *inner) if many else values).is_contiguous()
        """Whether flat memory has the order of the parameter's own; otherwise that of its indices."""
        self.inner = inner if many and self.regular else list(range(int(many), values.dim()))

    def view(self, flat: Tensor, start: int, rows: int) -> Tensor:
        """Some of its rows in flat memory, shaped like the parameter."""
        shape = (rows, *self.values.shape[1:]) if self.values.dim() > 1 else self.values.shape
        if self.regular:
            return flat.as_strided(shape, self.values.stride(), flat.storage_offset() + start)
        return flat[start : start + rows * self.length].view(shape)


class Part:
    """Rows of a member that lie in one block."""

    def __init__(self, member: Member, stretch: Stretch) -> None:
        first = max(stretch.first, member.first)
        last = min(stretch.last, member.first + member.rows)
        self.member, self.rows, self.first = member, last - first, first - member.first
        self.begin = member.start + self.first * member.length
        """Its place in flat memory."""
        full, mine, offset = member.owner.shape, member.values.shape, member.owner.offset
        self._noise = slice(stretch.start, stretch.stop)
        self._full = (stretch.last - stretch.first, *(full[d] for d in member.inner))
        self._mine = (
            slice(first - stretch.first, last - stretch.first),
            *(slice(offset[d], offset[d] + mine[d]) for d in member.inner),
        )

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor like the member's values."""
        if self.rows == self.member.rows:
            return tensor
        return tensor[self.first : self.first + self.rows]

    def pick(self, noise: Tensor) -> Tensor:
        """Its values from the noise of the full block."""
        return noise[self._noise].view(self._full)[self._mine].reshape(-1)


@cache
def _generator(device: torch.device, thread: int) -> torch.Generator:
    """Each thread seeds generators of its own. They are kept: making one takes longer than seeding it."""
    return torch.Generator(device)


def standard_normal_(out: Tensor, seed: int) -> Tensor:
    """Fill `out` with standard normal values that depend on `seed` and its size alone."""
    if out.is_meta:  # it has neither values nor a generator
        return out.normal_()
    generator = _generator(out.device, threading.get_ident())
    return out.normal_(generator=generator.manual_seed(seed))


def spread(work: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """`work(item)` for each item, by this thread and others beside it; back when all is done.

    No thread records gradients meanwhile. After an error, an interrupt included, nothing more is
    begun, and it is raised only when no thread works any longer: whoever catches it may put the
    weights back at once.
    """
    if threads == 1:
        with torch.no_grad():
            for item in items:
                work(item)
        return
    todo = deque(items)  # its popleft is safe between threads

    @torch.no_grad()
    def work_off() -> None:
        try:
            while True:
                try:
                    item = todo.popleft()
                except IndexError:
                    return
                work(item)
        finally:
            todo.clear()

    others = [
        _pool(os.getpid(), threads).submit(work_off) for _ in range(min(threads, len(todo)) - 1)
    ]
    try:
        work_off()
    finally:
        if others:  # an empty wait takes longer than a small draw
            wait(others)
    for other in others:
        other.result()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads are kept for the life of the process: starting them costs more than a small draw.

    A forked child inherits the cache but not the threads, hence the process id.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix="steppe-noise")
