"""How a training reports its progress: events, shown as bars, as log lines, or given to a function."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from rich import progress as rich
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


def duration(seconds: float) -> str:
    """A time in two units at most.

    >>> duration(12.4), duration(190), duration(3900), duration(200_000)
    ('12 s', '3 min', '1 h 5 min', '55 h 33 min')
    """
    minutes = int(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Lines:
    """Log lines: for one run every few seconds, for several one at the end of each."""

    def __init__(self, weights: Mapping[str, float], seconds: float = 5.0) -> None:
        self.weights, self.seconds = weights, seconds
        self.finished, self.done = 0, 0.0
        self.began = time.monotonic()
        self._last = -seconds

    def __call__(self, event: Event) -> None:
        runs, now = max(1, len(self.weights)), time.monotonic()
        if event.done:
            self.finished += 1
            self.done += self.weights.get(event.run, 0.0)
            count = f"[{self.finished}/{runs}] " if runs > 1 else ""
            words = "  ".join(filter(None, [event.words(), self._left(now - self.began)]))
            logger.info("%s%s: %s  %s", count, event.run, event.done, words)
        elif runs == 1 and event.metrics and now - self._last >= self.seconds:
            self._last = now
            logger.info("%s: step %d/%d  %s", event.run, event.step, event.steps, event.words())

    def _left(self, seconds: float) -> str:
        """`(1 h 5 min left)` by the shares of the work that took so long; nothing at the end."""
        rest = seconds * (sum(self.weights.values()) - self.done) / self.done if self.done else 0.0
        return f"({duration(rest)} left)" if rest >= 1 else ""


class Bars(rich.Progress):
    """Bars on a terminal or in a notebook: one per active run, and one for all if there are several."""

    def __init__(self, weights: Mapping[str, float], title: str) -> None:
        super().__init__(
            rich.TextColumn("[bold]{task.description}"),
            rich.BarColumn(bar_width=24),
            rich.TextColumn("{task.percentage:>3.0f}%"),
            rich.TextColumn("{task.fields[rate]}", style="cyan"),
            rich.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            rich.TextColumn("{task.fields[words]}"),
            console=Console(stderr=True),
            speed_estimate_period=120,
        )
        self.weights = weights
        self.active: dict[str, rich.TaskID] = {}
        self.parts: dict[str, float] = {}
        self.whole: rich.TaskID | None = None
        if len(weights) > 1:
            total, words = sum(weights.values()), f"0/{len(weights)} runs"
            self.whole = self.add_task(title, total=total, rate="", words=words)

    def __call__(self, event: Event) -> None:
        if event.run not in self.active:
            self.active[event.run] = self.add_task(
                event.run, total=event.steps, completed=event.step, rate="", words=""
            )
        task = self.active[event.run]
        speed = next(t.speed for t in self.tasks if t.id == task)
        rate = f"{speed:.0f} steps/s" if speed else ""
        self.update(task, completed=event.step, rate=rate, words=event.words())
        if self.whole is None:
            return
        self.parts[event.run] = 1.0 if event.done else event.step / event.steps
        if event.done:
            self.remove_task(self.active.pop(event.run))
        done = sum(self.weights.get(run, 1.0) * share for run, share in self.parts.items())
        words = f"{len(self.parts) - len(self.active)}/{len(self.weights)} runs"
        self.update(self.whole, completed=done, words=words)


def display(
    show: Progress, weights: Mapping[str, float] | None = None, title: str = "all runs"
) -> AbstractContextManager[Listener]:
    """Bars on a terminal and in notebooks, else log lines; `show=False`, and all ranks but 0: nothing.

    `weights` gives the share of work of each run, by name, where there are several.
    """
    if show is False or not world().leads:
        return nullcontext(lambda event: None)
    if callable(show):
        return nullcontext(show)
    if "ipykernel" in sys.modules or sys.stderr.isatty():
        return Bars(weights or {}, title)
    return nullcontext(Lines(weights or {}))
