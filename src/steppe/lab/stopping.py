"""Ctrl-C, once: finish the step and save. Twice: stop at once."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_outside: Callable[[], bool] | None = None
_end = math.inf


def obey(asked: Callable[[], bool]) -> None:
    """In a worker process: signals are the parent's business, which `asked` tells about."""
    global _outside
    _outside = asked
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def ending_after(minutes: float | None) -> Iterator[None]:
    """Ask what trains in this block to stop, as Ctrl-C does, when the time is over."""
    global _end
    if minutes is not None:
        _end = time.monotonic() + 60 * minutes
    try:
        yield
    finally:
        _end = math.inf


class StopSignal:
    """While entered, a first SIGINT or SIGTERM only sets `asked`; a second one interrupts.

    Outside the main thread Python allows no signal handlers, and Ctrl-C acts as usual.
    """

    def __init__(self) -> None:
        self._noticed = False
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether somebody wants an end."""
        return self._noticed or time.monotonic() > _end or (_outside is not None and _outside())

    def __enter__(self) -> StopSignal:
        if _outside is None and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _notice(self, *_: object) -> None:
        if self._noticed:
            raise KeyboardInterrupt
        self._noticed = True
