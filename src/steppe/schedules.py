"""Schedules: how strong a perturbation is, over time or by its effect.

Wherever steppe takes a strength, a number (constant) or a schedule is taken: any callable
``step -> float``. The three here also know their length, so that whoever knows how long training is
can fill it in.

A loss rise is a strength by its effect. With eps = r z, the mean of <eps, g(w + eps)> is exactly
dE[L(w + eps)] / d ln r, whatever z's distribution; half of it is the rise of a quadratic loss. Both
factors are there anyway while a pass ends, so the rise is measured on the way, and r follows it:

    num  <- .98 num + .02 S       den <- .98 den + .02 r²        C = num / den
    base <- base exp(clip(ln(sqrt(2 rise / C) / base), ±.05))    at most `bound`; held where C <= 0
    ramp  = (1 - min(1, q / q0))^2       q: running mean of the pull on the outputs, q0: of ten steps
    r     = max(base sqrt(ramp), 1e-3)

The ramp keeps the noise away while the net has not learnt anything yet: that is what hurts. A rise
given as a schedule is taken as written, without it.
"""

from __future__ import annotations

import math
import numbers
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

Schedule = Callable[[int], float]
Strength = float | Schedule

RISE = 0.02
"""The rise where no strength is given (docs/decisions.md, *Default strengths*): the largest that cost
accuracy on none of the networks tried, not the best on any one."""
KEPT = 0.98
"""Of the running means, per step."""
FIRST, LEAST, MOST = 0.05, 1e-3, 0.05
"""The base before anything is known; the least r, for below it nothing is measured; the most that ln
base changes in a step."""
OPENING = 10
"""Steps whose mean pull is what later ones are compared with."""
PERIOD = 4
"""After these, one step in so many is measured: what it takes is then little beside a step."""
STUCK = 100
"""Steps at the bound after which r is halved."""
NOTHING = 0.01
"""Of the rise that is asked for: less than this at the bound, and the loss has another unit."""
SHUT_AFTER = 500
BASE = 5
"""Where the state holds r before the ramp."""
REST = 8
"""Every so many steps one runs at the true weights, and it alone updates BatchNorm's statistics."""


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
            if self.steps < 1:
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
    if not callable(value):
        check_nonnegative(name, value, "a number or a schedule")


def check_number(name: str, value: Any, wanted: str = "a number", *, whole: bool = False) -> None:
    """Raise unless `value` is a number, and a whole one of at least 1 where it counts something."""
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be {'a whole number' if whole else wanted}, got {value!r}.")
    if whole and value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")


def check_nonnegative(name: str, value: Any, wanted: str = "a number") -> None:
    """Raise unless `value` is a finite number of at least zero."""
    check_number(name, value, wanted)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be finite and at least 0, got {value}.")


def check_share(name: str, value: Any, *, below: bool = False) -> None:
    """Raise unless `value` is in [0, 1]; in [0, 1) for `below`, as what a running mean keeps."""
    check_number(name, value)
    if not 0 <= value <= 1 or (below and value == 1):
        raise ValueError(f"{name} must be in [0, 1{')' if below else ']'}, got {value}.")


def needs_steps(strength: Strength | None) -> TypeGuard[Ramp]:
    """Whether this is a schedule that waits for the length of training."""
    return isinstance(strength, Ramp) and strength.steps is None


def with_steps(strength: Strength | None, steps: int) -> Strength | None:
    """The same strength with its length filled in where it was left open."""
    return replace(strength, steps=steps) if needs_steps(strength) else strength


def one_strength(**given: Strength | None) -> str:
    """The name of the one strength that was given; raises if it is not one, or not a strength."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) != 1:
        names = " or ".join(given)
        got = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "none"
        raise ValueError(f"Give one strength, {names}; got {got}.")
    ((name, value),) = chosen.items()
    check_strength(name, value)
    return name


class Reading(NamedTuple):
    """What the steering knows, as plain numbers."""

    rise: float
    measured_rise: float
    measured_rise_stderr: float
    ramp: float
    ratio: float


@dataclass(frozen=True)
class Steering:
    """Holds the loss rise of a perturbation at `rise` by its factor r, relative displacement.

    The state is one small vector: num, den, running mean of S², num and den with slower means, base,
    pull, first pull, steps seen, steps at the bound, times halved, r.
    """

    rise: Strength
    bound: float = 0.5
    power: int = 2
    linear: bool = False
    """Of an ascent, whose rise is its slope; r is not used, rho = rise / ‖g‖ is known directly."""

    def __post_init__(self) -> None:
        check_strength("rise", self.rise)

    @property
    def ramped(self) -> bool:
        return not callable(self.rise)

    def asked(self, step: int) -> float:
        return strength_at(self.rise, step, name="rise")

    def init(self, like: Tensor) -> Tensor:
        state = like.new_zeros(12)
        state[BASE], state[6], state[11] = FIRST, 1.0, LEAST if self.ramped else FIRST
        return state

    def ramp(self, state: Tensor) -> Tensor:
        """How far the noise is let in: 0 in the first steps, 1 when nothing pulls any longer."""
        return self._root(state[6], state[7]).square()

    def _root(self, pull: Tensor, first: Tensor) -> Tensor:
        """The root of the ramp; 0 while the opening's mean, and so `pull`, is still the first."""
        if not self.ramped:
            return torch.ones_like(pull)
        left = (pull / first.clamp_min(1e-30)).clamp_(max=1.0)
        return (1 - left).pow_(self.power / 2)

    def factor(self, state: Tensor) -> Tensor:
        """r, on the device: the same on every rank, whether it perturbs or not."""
        return state[11]

    def update(
        self, state: Tensor, slope: Tensor, pull: Tensor, step: int, elapsed: int = 1
    ) -> None:
        """Learn from one step, `elapsed` steps after the last: `slope` is S, `pull` the sum of |dL/dz|
        over the outputs. A step that is not finite changes nothing."""
        new_weight, most = 1 - KEPT**elapsed, math.exp(MOST * elapsed)
        slope, pull, asked = slope.to(state), pull.to(state), self.asked(step)
        base, q, first, seen, stuck, halved, r = state[5:].unbind()
        new = torch.stack([slope, r * r if asked else torch.zeros_like(r), slope * slope])
        means, slow = state[:3].lerp(new, new_weight), state[3:5].lerp(new[:2], new_weight / 2)
        if asked:  # otherwise nothing moved, and there is nothing to follow
            curvature, before = means[0] / means[1], slow[0] / slow[1]
            # a loss that saturates looks ever flatter the stronger the noise: no reason for more of it
            flatter = curvature < before.clamp_min(1e-30) / 2
            sharpest = (
                math.inf if self.ramped else max(2 * asked / LEAST**2, 1e-30)
            )  # r is LEAST there
            wanted = (2 * asked / curvature.clamp(1e-30, sharpest)).sqrt_()
            highest = torch.where(flatter, base, base * most).clamp_(max=self.bound)
            base = torch.minimum(wanted, highest).maximum(base / most)
            stuck = (stuck + elapsed) * (base >= self.bound)
        halve = stuck >= STUCK
        base = torch.where(halve, base / 2, base)
        seen = seen + 1
        opening = seen <= OPENING  # the first steps' mean, then a running one
        q = q.lerp(pull, torch.where(opening, 1 / seen, new_weight))
        first = torch.where(opening, q, first)
        r = (base * self._root(q, first)).clamp_(min=LEAST)
        parts = [base, q, first, seen, stuck.masked_fill(halve, 0.0), halved + halve, r]
        found = torch.cat([means, slow, torch.stack(parts)])
        state.copy_(torch.where(found.abs().amax() < torch.inf, found, state))

    def read(self, state: Tensor, step: int) -> Reading:
        """For `stats()` and `print(perturber)`: waits for the device."""
        num, square, seen = (float(state[n]) for n in (0, 2, 8))
        weight = 1 - KEPT ** (seen + (PERIOD - 1) * max(0.0, seen - OPENING))
        mean = num / weight if weight else float("nan")
        spread = max(0.0, square / weight - mean * mean) if weight else float("nan")
        effective = max(1.0, min(seen, (1 + KEPT**PERIOD) / (1 - KEPT**PERIOD)))
        half, asked = 1.0 if self.linear else 0.5, self.asked(step)
        stderr, ratio = (spread / effective) ** 0.5, float(state[11]) if asked else 0.0
        return Reading(asked, half * mean, half * stderr, float(self.ramp(state)), ratio)

    def warn(self, state: Tensor, step: int, halvings: int) -> int:
        """Say what does not work, now and then (it waits for the device); the halvings so far."""
        found, reading = int(state[10]), self.read(state, step)
        # at the bound of a net that fits its data under the noise nothing is wrong: it is flat
        fits = reading.measured_rise > NOTHING * reading.rise and bool(state[6] < state[7] / 2)
        if found > halvings and not fits:
            warnings.warn(
                f"A loss rise of {reading.rise:g} cannot be held: the relative displacement stood at "
                f"its bound of {self.bound:g} for {STUCK} steps and was halved. The loss may be in a "
                "small unit, or saturate under noise: ask for a smaller rise.",
                stacklevel=2,
            )
        shut = self.ramped and reading.rise > 0 and reading.ramp < 0.05
        if shut and SHUT_AFTER < step < SHUT_AFTER + 100:
            warnings.warn(
                f"After {step} steps the perturbation is still almost off (ramp {reading.ramp:.2g}): the loss "
                "pulls on the outputs as at the start, so there is nothing to regularise yet. Give the "
                "rise as a schedule to perturb nevertheless: rise=steppe.constant(0.05).",
                stacklevel=2,
            )
        return found
