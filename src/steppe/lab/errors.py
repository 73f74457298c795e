"""What the lab raises when a person can repair it: one line that says what, which, and what next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from steppe.lab import naming

T = TypeVar("T")


class LabError(Exception):
    """A mistake in a setting, a file or the data; the command line shows it without a traceback."""

    shared = False
    """Whether every rank of a parallel run raises it, so that one of them shows it for all."""


class DivergedError(LabError):
    """The loss stopped being a number."""

    shared = True


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, finished its step and saved."""

    def __init__(self, step: int, steps: int, folder: Path | None) -> None:
        super().__init__(step, steps, folder)
        self.step, self.steps, self.folder = step, steps, folder

    def __str__(self) -> str:
        where = f", saved in {self.folder}" if self.folder else ", nothing saved (no run folder)"
        return f"stopped after step {self.step} of {self.steps}{where}"


def unknown(kind: str, given: str, valid: Iterable[str]) -> LabError:
    """The error for a name that does not exist, with the nearest ones that do."""
    return LabError(str(naming.unknown(kind, given, sorted(valid))))


def looked_up(kind: str, name: str, among: Mapping[str, T]) -> T:
    """What a name stands for, or the error for one that does not exist."""
    if name not in among:
        raise unknown(kind, name, among)
    return among[name]


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Mistakes that other modules report as ValueError and the like, as the user's own."""
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError) as error:
        first = str(error).partition("\n")[0]
        raise LabError(f"{what}: {first}" if what else first) from error
