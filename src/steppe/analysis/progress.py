"""What an analysis will cost, and how far it is."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from steppe.analysis.problem import Problem

P = TypeVar("P")


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
        self, problem: Problem, unit: Literal["forwards", "gradients", "products"] = "forwards"
    ) -> None:
        """Say what there is to do."""
        if self.show is None:
            self.show = sys.stderr.isatty()
        self._begin = time.monotonic()
        if self.show is True:
            cost = estimate(problem, **{unit: self.total})
            sys.stderr.write(f"{self.label}: {self.total} {unit}, {cost}\n")
        self.step(by=0)

    def step(self, note: str = "", *, by: float = 1) -> None:
        self.done += by
        part = min(self.done / max(self.total, 1), 1.0)
        if callable(self.show):
            self.show(part)
        elif self.show:
            bar = "█" * round(24 * part)
            each = (time.monotonic() - self._begin) / max(self.done, 1)
            rest = _duration(each * max(self.total - self.done, 0))
            sys.stderr.write(f"\r{self.label} {bar:<24} {part:4.0%} {rest} left {note}\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        self.step(by=max(self.total - self.done, 0))
        if self.show is True:
            sys.stderr.write("\n")

    def rows(self, parts: Sequence[P], row: Callable[[P], Tensor], problem: Problem) -> Tensor:
        """The rows of all parts stacked, each an equal part of the work."""
        self.start(problem)
        found = []
        for part in parts:
            found.append(row(part))
            self.step(by=self.total / len(parts))
        self.close()
        return torch.stack(found)


def _scaled(number: float) -> str:
    thousands = min(int(math.log10(max(number, 1.0)) / 3), 6)
    return f"{number / 1000**thousands:.3g} {'kMGTPE'[thousands - 1 : thousands]}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
