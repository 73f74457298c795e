"""Gaussian noise that is a pure function of where and when it is used.

Each block of weights seeds its own generator from (seed, step, stream, replica, block), so there
is nothing but seed and step to save, the global random state is never touched, and the noise is
the same whatever the number of threads, ranks or shards.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

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


class _Generators(threading.local):
    """Each thread seeds generators of its own."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.Generator] = {}


_generators = _Generators()


def standard_normal_(out: Tensor, seed: int) -> Tensor:
    """Fill `out` with standard normal values that depend on `seed` and its size alone."""
    if out.is_meta:  # it has neither values nor a generator
        return out.normal_()
    generator = _generators.by_device.get(out.device)
    if generator is None:
        generator = _generators.by_device[out.device] = torch.Generator(out.device)
    generator.manual_seed(seed)
    return out.normal_(generator=generator)


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

    others = [_pool(threads).submit(work_off) for _ in range(min(threads, len(todo)) - 1)]
    try:
        work_off()
    finally:
        if others:
            wait(others)
    for other in others:
        other.result()


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads are kept for the life of the process: starting them costs more than a small draw.

    A forked child inherits the table but not the threads, hence the process id in the key.
    """
    key = (os.getpid(), threads)
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="steppe-noise")
    return _pools[key]
