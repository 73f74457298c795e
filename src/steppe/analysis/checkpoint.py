"""Checkpoints: what a long analysis has done so far, so that it can resume after a stop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steppe.analysis.results import read_npz, write_npz

if TYPE_CHECKING:
    from steppe.analysis.problem import Problem
    from steppe.analysis.progress import Progress


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
