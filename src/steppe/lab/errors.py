"""What the lab raises when a person can repair it: one line that says what, which, and what next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class LabError(Exception):
    """A mistake in a setting, a file or the data; the command line shows it without a traceback."""


class Diverged(LabError):
    """The loss stopped being a number."""

    def __init__(self, step: int, lr: float, strength: float | None, folder: Path | None) -> None:
        super().__init__(step, lr, strength, folder)
        self.step, self.lr, self.strength, self.folder = step, lr, strength, folder

    def __str__(self) -> str:
        strength = "" if self.strength is None else f" and strength {self.strength:.3g}"
        kept = f" The last good checkpoint is kept in {self.folder}." if self.folder else ""
        return (
            f"the loss is not a number at step {self.step}, with learning rate {self.lr:.3g}"
            f"{strength}. Lower one of them.{kept}"
        )


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, finished its step and saved."""

    def __init__(self, step: int, steps: int, folder: Path | None) -> None:
        super().__init__(step, steps, folder)
        self.step, self.steps, self.folder = step, steps, folder

    def __str__(self) -> str:
        where = f", saved in {self.folder}" if self.folder else ", nothing saved (no run folder)"
        return f"stopped after step {self.step} of {self.steps}{where}"


def unknown(kind: str, given: str, valid: Iterable[str]) -> LabError:
    """`unknown method 'arwq'. Did you mean arwp? Valid: …`"""
    names = sorted(valid)
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    return LabError(f"unknown {kind} {given!r}.{guess} Valid: {', '.join(names)}.")
