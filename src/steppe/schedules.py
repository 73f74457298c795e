"""Schedules: plain functions from the optimizer step to a strength.

Wherever steppe takes a strength, a number (constant) or a schedule is taken. Any callable
``step -> float`` is a schedule; the three here also know their length, so that whoever knows
how long training is can fill it in.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

Schedule = Callable[[int], float]
Strength = float | Schedule


@dataclass(frozen=True)
class Constant:
    """The same strength at every step."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class Ramp(ABC):
    """From `start` to `end` over `steps` optimizer steps, then `end` for ever."""

    start: float
    end: float
    steps: int | None = None

    def __post_init__(self) -> None:
        check_strength("start", self.start)
        check_strength("end", self.end)
        if self.steps is not None:
            check_number("steps", self.steps)
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")

    def __call__(self, step: int) -> float:
        if self.steps is None:
            raise ValueError(
                f"{self} does not know how long training is. Give it the number of optimizer "
                "steps, for example cosine_increase(0, 0.01, steps=epochs * len(loader))."
            )
        return self.start + (self.end - self.start) * self.shape(min(step / self.steps, 1.0))

    @abstractmethod
    def shape(self, progress: float) -> float:
        """The part of the way done when `progress` in [0, 1] of the steps are over."""


class Linear(Ramp):
    def shape(self, progress: float) -> float:
        return progress


class CosineIncrease(Ramp):
    def shape(self, progress: float) -> float:
        return (1 - math.cos(math.pi * progress)) / 2


def constant(value: float) -> Constant:
    """The same strength at every step; a bare number means the same.

    Examples:
        >>> constant(0.01)(500)
        0.01
    """
    check_strength("value", value)
    return Constant(value)


def linear(start: float, end: float, steps: int | None = None) -> Linear:
    """A straight line from `start` to `end`.

    Examples:
        >>> [linear(0, 1, steps=4)(t) for t in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return Linear(start, end, steps)


def cosine_increase(start: float, end: float, steps: int | None = None) -> CosineIncrease:
    """Half a cosine from `start` up to `end`: the paper's schedule for RWP and ARWP.

    `start + (end - start) (1 - cos(pi t / steps)) / 2`. With `steps=None` the length is filled
    in by whoever knows it (the lab, the integrations); plain `attach` asks for it.

    Examples:
        >>> [round(cosine_increase(0, 0.01, steps=4)(t), 4) for t in range(5)]
        [0.0, 0.0015, 0.005, 0.0085, 0.01]
    """
    return CosineIncrease(start, end, steps)


def strength_at(strength: Strength, step: int, *, name: str = "strength") -> float:
    """The strength at an optimizer step, checked."""
    if not callable(strength):
        return float(strength)
    found = strength(step)
    try:
        value = float(found)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: the schedule gave {found!r} at step {step}, no number.") from None
    check_strength(f"{name}: the schedule's value at step {step}", value)
    return value


def check_strength(name: str, value: object) -> None:
    """Raise unless `value` is a schedule or a finite number of at least zero."""
    if callable(value):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number or a schedule, got {value!r}.")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be finite and at least 0, got {value}.")


def check_number(name: str, value: object, *, whole: bool = False) -> None:
    """Raise unless `value` is a number, and a whole one of at least 1 where it counts something."""
    kind, wanted = (numbers.Integral, "a whole number") if whole else (numbers.Real, "a number")
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {wanted}, got {value!r}.")
    if whole and value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def check_nonnegative(name: str, value: float) -> None:
    check_number(name, value)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be finite and at least 0, got {value}.")


def check_decay(name: str, value: float) -> None:
    check_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}.")


def needs_steps(strength: Strength | None) -> bool:
    """Whether this is a schedule that waits for the length of training."""
    return isinstance(strength, Ramp) and strength.steps is None


def with_steps(strength: Strength | None, steps: int) -> Strength | None:
    """The same strength with its length filled in where it was left open."""
    if isinstance(strength, Ramp) and strength.steps is None:
        return replace(strength, steps=steps)
    return strength
