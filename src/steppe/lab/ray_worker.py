"""A run in a Ray worker: what is sent there, what it reports on the way, what comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steppe.lab.engines import Job
from steppe.lab.errors import Interrupted, explained
from steppe.lab.naming import library
from steppe.lab.problems import Sources
from steppe.lab.progress import Event, Listener
from steppe.lab.results import Result
from steppe.lab.runs import BusyError
from steppe.lab.stopping import obey
from steppe.lab.training import device_here

logger = logging.getLogger("steppe")

PATIENCE = 30.0
"""Seconds that a second attempt waits for the first one's children to let go of the run."""


def load_ray() -> Any:
    """The package, or how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with explained("engine ray"):
        return library("ray", "'steppe[ray]'")


class Board:
    """An actor: where runs tell how far they are, and hear that they should stop."""

    def __init__(self) -> None:
        self._events: dict[str, Event] = {}
        self._warnings: list[str] = []
        self._stop = asyncio.Event()

    async def stopped(self) -> bool:
        """Whether there is no use in beginning."""
        return self._stop.is_set()

    async def tell(self, event: Event) -> None:
        self._events[event.run] = event

    async def warn(self, text: str) -> None:
        self._warnings.append(text)

    async def read(self) -> tuple[list[Event], list[str]]:
        """The newest event of each run, and all warnings, since the last reading."""
        found = list(self._events.values()), self._warnings
        self._events, self._warnings = {}, []
        return found

    async def stop(self) -> None:
        """Tell all runs to stop, and those that have not begun to end at once."""
        self._stop.set()

    async def stopping(self) -> None:
        """Answers when runs should stop."""
        await self._stop.wait()


@dataclass(frozen=True)
class Trial:
    """A run as it is sent to a worker."""

    index: int
    job: Job
    store: Path | None
    folder: Path
    """Where the driver is: relative names of data and code start there."""
    path: tuple[str, ...]
    """Where the driver finds modules."""
    attempt: int = 0


def train_trial(trial: Trial, sources: bytes, board: Any) -> Result | Interrupted:
    """One run, in a worker; it may be on another machine that shares the store's disk."""
    ray = load_ray()
    if ray.get(board.stopped.remote()):
        return Interrupted(0, 0, None)
    if trial.folder.is_dir():
        os.chdir(trial.folder)
    sys.path += [place for place in trial.path if place not in sys.path]
    with _stop_heard(ray, board), _warnings_to(board, trial.job.label):
        device_here(trial.job.config.device)
        given: Sources = ray.cloudpickle.loads(sources)
        try:
            return _patiently(trial, given, lambda event: _tell(ray, board, event))
        except Interrupted as stopped:  # raised, Ray would take it for a cancelled task
            return stopped


def _patiently(trial: Trial, sources: Sources, listener: Listener) -> Result:
    """A killed worker's own children may hold its run for some seconds more."""
    deadline = time.monotonic() + (PATIENCE if trial.attempt else 0)
    while True:
        try:
            return trial.job.train(sources, trial.store, listener)
        except BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _tell(ray: Any, board: Any, event: Event) -> None:
    sent = board.tell.remote(event)
    if event.done:
        ray.get(sent)  # before the result, after which nobody reads


@contextmanager
def _stop_heard(ray: Any, board: Any) -> Iterator[None]:
    """Within, the run stops when the board says so, or is no more."""
    asked = threading.Event()
    obey(asked.is_set)
    answer = board.stopping.remote()
    answer.future().add_done_callback(lambda _: asked.set())
    try:
        yield
    finally:
        ray.cancel(answer)


@contextmanager
def _warnings_to(board: Any, label: str) -> Iterator[None]:
    """Within, what steppe warns of is said on the driver's screen."""

    class Relay(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            board.warn.remote(f"{label}: {record.getMessage()}")

    relay = Relay(logging.WARNING)
    logger.addHandler(relay)
    try:
        yield
    finally:
        logger.removeHandler(relay)
