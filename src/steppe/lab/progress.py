"""How a training reports its progress: events, shown as bars, as log lines, or given to a function."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rich import progress as rich_progress
from rich.console import Console

from steppe.lab.ranks import world

logger = logging.getLogger("steppe")


@dataclass(frozen=True)
class Event:
    """A run has reached a step; `done` is "finished" or "diverged" in its last event.

    Events come some ten times a second, and after every epoch and evaluation.
    """

    run: str
    """The run's name, `arwp seed 0`."""
    step: int
    """Optimizer steps done."""
    steps: int
    """Optimizer steps in all."""
    loss: float | None = None
    """The newest training loss."""
    metrics: tuple[tuple[str, float], ...] = ()
    """The newest evaluation: pairs of name and value."""
    done: str = ""
    """How the run ended; empty while it is trained."""

    def words(self) -> str:
        """`loss 0.4321  accuracy 93.1`"""
        parts = [] if self.loss is None else [f"loss {self.loss:.4g}"]
        return "  ".join([*parts, *(f"{name} {value:.4g}" for name, value in self.metrics)])


Listener = Callable[[Event], None]

Progress = bool | Listener | None
"""True or False shows or hides it, None shows it where a person is looking, a function is called."""


class Display(Protocol):
    """Shows events of one or several runs."""

    def __call__(self, event: Event) -> None: ...
    def __enter__(self) -> Display: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None: ...


class Silent(AbstractContextManager["Silent"]):
    """Shows nothing."""

    def __call__(self, event: Event) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


class Called(AbstractContextManager["Called"]):
    """Gives every event to a function of the user's."""

    def __init__(self, function: Listener) -> None:
        self.function = function

    def __call__(self, event: Event) -> None:
        self.function(event)

    def __exit__(self, *_: object) -> None:
        return


class Left:
    """How long several runs will still take, by their shares of the work."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights, self.all, self.done = weights, sum(weights.values()), 0.0
        self.began = time.monotonic()

    def words(self, finished: str) -> str:
        """`1 h 5 min left`, now that this run is finished; nothing at the end."""
        self.done += self.weights.get(finished, 0.0)
        part = self.done / self.all if self.all else 1.0
        seconds = (time.monotonic() - self.began) * (1 - part) / part if part else 0.0
        return f"({duration(seconds)} left)" if seconds >= 1 else ""


def duration(seconds: float) -> str:
    """A time in two units at most.

    >>> duration(12.4), duration(190), duration(3900), duration(200_000)
    ('12 s', '3 min', '1 h 5 min', '55 h 33 min')
    """
    minutes = int(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Lines(AbstractContextManager["Lines"]):
    """Log lines: for one run every few seconds, for several one at the end of each."""

    def __init__(self, weights: Mapping[str, float], seconds: float = 5.0) -> None:
        self.runs, self.seconds = max(1, len(weights)), seconds
        self.finished = 0
        self.left = Left(weights)
        self._last = -seconds

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if event.done:
            self.finished += 1
            count = f"[{self.finished}/{self.runs}] " if self.runs > 1 else ""
            words = "  ".join(filter(None, [event.words(), self.left.words(event.run)]))
            logger.info("%s%s: %s  %s", count, event.run, event.done, words)
        elif self.runs == 1 and event.metrics and now - self._last >= self.seconds:
            self._last = now
            logger.info("%s: step %d/%d  %s", event.run, event.step, event.steps, event.words())

    def __exit__(self, *_: object) -> None:
        return


class Bars(AbstractContextManager["Bars"]):
    """Bars on a terminal or in a notebook: one per active run, and one for all if there are several."""

    def __init__(self, weights: Mapping[str, float], title: str) -> None:
        self.weights = weights
        self.progress = rich_progress.Progress(
            rich_progress.TextColumn("[bold]{task.description}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TextColumn("{task.percentage:>3.0f}%"),
            rich_progress.TextColumn("{task.fields[rate]}", style="cyan"),
            rich_progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            rich_progress.TextColumn("{task.fields[words]}"),
            console=Console(stderr=True),
            speed_estimate_period=120,
        )
        self.tasks: dict[str, rich_progress.TaskID] = {}
        self.parts: dict[str, float] = {}
        self.finished = 0
        self.whole: rich_progress.TaskID | None = None
        if len(weights) > 1:
            words = f"0/{len(weights)} runs"
            self.whole = self.progress.add_task(
                title, total=sum(weights.values()), rate="", words=words
            )

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, event: Event) -> None:
        if event.run not in self.tasks:
            self.tasks[event.run] = self.progress.add_task(
                event.run, total=event.steps, completed=event.step, rate="", words=""
            )
        task = self.tasks[event.run]
        speed = next(t.speed for t in self.progress.tasks if t.id == task)
        rate = f"{speed:.0f} steps/s" if speed else ""
        self.progress.update(task, completed=event.step, rate=rate, words=event.words())
        if self.whole is not None:
            self._move_whole(event, task, self.whole)

    def _move_whole(
        self, event: Event, task: rich_progress.TaskID, whole: rich_progress.TaskID
    ) -> None:
        part = 1.0 if event.done else event.step / event.steps
        self.parts[event.run] = part
        done = sum(self.weights.get(run, 1.0) * share for run, share in self.parts.items())
        self.progress.update(whole, completed=done)
        if event.done:
            self.finished += 1
            self.progress.update(whole, words=f"{self.finished}/{len(self.weights)} runs")
            self.progress.remove_task(task)
            del self.tasks[event.run]


def display(
    show: Progress, weights: Mapping[str, float] | None = None, title: str = "all runs"
) -> Display:
    """Bars on a terminal and in notebooks, else log lines; `show=False`, and all ranks but 0: nothing.

    A function is called with every event instead.

    `weights` gives the share of work of each run, by name, where there are several.
    """
    if show is False or not world().leads:
        return Silent()
    if callable(show):
        return Called(show)
    weights = weights or {}
    notebook = "ipykernel" in sys.modules
    if notebook or sys.stderr.isatty():
        return Bars(weights, title)
    return Lines(weights)
