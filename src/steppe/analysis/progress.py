"""What an analysis will cost, how far it is, and a checkpoint to resume from after a stop."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from steppe.analysis.results import read_npz, write_npz

if TYPE_CHECKING:
    from steppe.analysis.problem import Problem


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and seconds; the seconds are measured here and now."""

    flops: float
    seconds: float

    def __str__(self) -> str:
        return f"{_scaled(self.flops)}FLOP, about {_duration(self.seconds)}"


def estimate(problem: Problem, *, forwards: int = 0, gradients: int = 0, products: int = 0) -> Cost:
    """The cost of so many losses, gradients and Hessian products over all samples.

    One micro-batch of each is run and measured. `landscape` takes `n * n` forwards,
    `spectrum` takes `steps * probes` products.
    """
    from steppe.analysis.hessian import Hessian

    with problem.replica() as replica:
        hessian = Hessian(replica)
        size = len(next(replica.batches())[0])
        rows = slice(0, size)
        works: list[tuple[int, Callable[[], object]]] = [
            (forwards, lambda: replica.evaluate(rows)),
            (gradients, lambda: replica.gradient(rows)),
            (products, lambda: hessian.product(replica.centre, rows)),
        ]
        times = [(count * problem.samples / size, _measure(work)) for count, work in works if count]
    return Cost(sum(n * one.flops for n, one in times), sum(n * one.seconds for n, one in times))


def _measure(work: Callable[[], object]) -> Cost:
    with FlopCounterMode(display=False) as counter:
        work()
    seconds = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - start)
    return Cost(float(counter.get_total_flops()), seconds)


Show = bool | Callable[[float], None] | None
"""True or False shows or hides progress, None shows it on a terminal, a function is called with the
part that is done, from 0 to 1."""


@dataclass
class Progress:
    """A line on standard error that first says the cost and then how far the work is.

    The estimate costs two micro-batches, and is made only if it is shown.
    """

    label: str
    total: int
    show: Show = None
    done: float = 0

    def start(
        self,
        problem: Problem,
        unit: Literal["forwards", "gradients", "products"] = "forwards",
        *,
        part: float = 0.0,
    ) -> None:
        """Say what is left to do; `part` of it (0 to 1) was done before a stop."""
        if self.show is None:
            self.show = sys.stderr.isatty()
        self._begin, self._first = time.monotonic(), part * self.total
        if self.show is True:
            left = max(self.total - int(self._first), 1)
            rest = f"{left} to go, " if part else ""
            cost = estimate(problem, **{unit: left})
            sys.stderr.write(f"{self.label}: {self.total} {unit}, {rest}{cost}\n")
        self.step(by=self._first)

    def step(self, note: str = "", *, by: float = 1) -> None:
        self.done += by
        part = min(self.done / max(self.total, 1), 1.0)
        if callable(self.show):
            self.show(part)
        elif self.show:
            bar = "█" * round(24 * part)
            left = (time.monotonic() - self._begin) / max(self.done - self._first, 1)
            rest = _duration(left * max(self.total - self.done, 0))
            sys.stderr.write(f"\r{self.label} {bar:<24} {part:4.0%} {rest} left {note}\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        self.step(by=max(self.total - self.done, 0))
        if self.show is True:
            sys.stderr.write("\n")


def _scaled(number: float) -> str:
    thousands = min(int(math.log10(max(number, 1.0)) / 3), 6)
    return f"{number / 1000**thousands:.3g} {'kMGTPE'[thousands - 1 : thousands]}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass
class Checkpoint:
    """A file with the state of one analysis; without a path it does nothing.

    `settings` is all that decides the outcome (data, weights, seeds, sizes): a file written under
    other settings is refused, never continued.
    """

    path: str | os.PathLike[str] | None
    settings: dict[str, Any]
    every: float = 20.0
    _written: float = field(default_factory=time.monotonic)

    def load(self) -> dict[str, Tensor]:
        """The stored state, empty if there is none yet."""
        if self.path is None or not Path(self.path).exists():
            return {}
        head, arrays = read_npz(self.path)
        mine = json.loads(json.dumps(self.settings))
        stored = head.get("checkpoint")
        if stored != mine:
            raise ValueError(
                f"The checkpoint {self.path} belongs to another analysis: "
                f"{_difference(stored, mine)}. Delete it, or name another file."
            )
        return arrays

    def save(self, state: Callable[[], dict[str, Tensor]]) -> None:
        """Write the state, at most once in `every` seconds."""
        if self.path is None or time.monotonic() - self._written < self.every:
            return
        arrays = {name: tensor.numpy() for name, tensor in state().items()}
        write_npz(self.path, {"checkpoint": self.settings}, arrays)
        self._written = time.monotonic()

    def rows(
        self, count: int, row: Callable[[int], Tensor], problem: Problem, bar: Progress
    ) -> Tensor:
        """`row(0), row(1), …` stacked, each an equal part of the bar; begins after those stored."""
        done = list(self.load().get("rows", ()))
        bar.start(problem, part=len(done) / count)
        for index in range(len(done), count):
            done.append(row(index))
            bar.step(by=bar.total / count)
            self.save(lambda: {"rows": torch.stack(done)})
        bar.close()
        self.remove()
        return torch.stack(done)

    def remove(self) -> None:
        """The analysis is done: what counts now is its result."""
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)


def _difference(stored: Any, mine: dict[str, Any]) -> str:
    if not isinstance(stored, dict):
        return "it is no checkpoint"
    keys = [key for key in {**stored, **mine} if stored.get(key) != mine.get(key)]
    return ", ".join(f"{key} was {stored.get(key)!r}, is {mine.get(key)!r}" for key in keys)
