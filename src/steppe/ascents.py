"""Ascents: perturbations that follow a gradient instead of being drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from steppe.layout import local
from steppe.noise import Draw
from steppe.perturbations import Gradients, Perturbation, Scale, State, check_nonnegative
from steppe.schedules import Strength, check_number, check_strength, strength_at
from steppe.strength import Steering, one_strength
from steppe.weights import Weights


@dataclass(frozen=True)
class Ascent(Perturbation):
    """SAM's step up the gradient: eps = rho g / ‖g‖ with the norm over all perturbed weights.

    `rise` in place of rho: rho = rise / ‖g‖, which raises the loss by `rise` to first order.
    `adaptive` is ASAM's form, invariant to rescaling weights: with T = |w| + eta,
    eps = rho T² g / ‖T g‖.
    """

    rho: Strength | None = None
    adaptive: bool = False
    eta: float = 0.0
    rise: Strength | None = None

    needs_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_strength(rho=self.rho, rise=self.rise)
        check_nonnegative("eta", self.eta)

    @property
    def steering(self) -> Steering | None:
        return None if self.rise is None else Steering(self.rise, linear=True)

    def strength(self, step: int) -> float:
        name = one_strength(rho=self.rho, rise=self.rise)
        return strength_at(getattr(self, name), step, name=name)

    def _length(self, weights: Weights, norm: Tensor, step: int) -> Tensor | float:
        """rho; with a rise, what raises the linear loss by it, ten times the usual rho at most."""
        if self.rise is None or weights.gain is None:
            return self.strength(step)
        return (self.strength(step) * weights.gain / norm).clamp(max=5.0 if self.adaptive else 0.5)

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        gradient = [None if g is None else local(g) for g in gradient]
        scaled = [g for g in gradient if g is not None] if self.adaptive else []
        if scaled:  # in place: the gradient of SAM's first pass serves nothing else
            pairs = zip(gradient, weights.moved, strict=True)
            sizes = torch._foreach_abs([p.values for g, p in pairs if g is not None])
            torch._foreach_add_(sizes, self.eta)
            torch._foreach_mul_(scaled, sizes)
        norm = weights.total_norm(gradient, weights.moved)
        if scaled:
            torch._foreach_mul_(scaled, sizes)
        length = draw.sign * self._length(weights, norm, draw.step)
        weights.add(gradient, per_norm(length, norm), uphill=True)

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        """rho; ASAM's own radius also depends on the gradient, this is the one in scaled space."""
        if self.rise is not None:
            raise self._missing("radius(): rho = rise / ‖g‖ is known in a step alone")
        return torch.tensor(self.strength(step), dtype=weights.dtype)


@dataclass(frozen=True)
class MomentumAscent(Perturbation):
    """MSAM: eps = -rho v / ‖v‖ with v <- momentum v + g over the optimizer's gradients.

    One pass per step. v is kept here rather than read from the optimizer, so that every optimizer
    will do; it costs a second extra copy of the weights. Before the first step v = 0 and eps = 0.
    """

    rho: Strength
    momentum: float = 0.9

    learns_from: ClassVar[Literal["nothing", "step", "pass"]] = "step"

    def __post_init__(self) -> None:
        check_strength("rho", self.rho)
        check_number("momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}.")

    def strength(self, step: int) -> float:
        return strength_at(self.rho, step, name="rho")

    def init(self, weights: Weights) -> State:
        return {"momentum": weights.zeros()}

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        v = [m for p, m in zip(weights.params, state["momentum"], strict=True) if p.active]
        norm = weights.total_norm(v, weights.moved)
        weights.add(v, per_norm(-draw.sign * self.strength(draw.step), norm), uphill=True)

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        norm = weights.total_norm(state["momentum"], weights.params)
        return torch.where(norm > 0, self.strength(step), 0.0)

    def learn(self, weights: Weights, state: State, grads: Gradients, scale: Scale) -> None:
        weights.decay_and_add(state["momentum"], grads, self.momentum, scale)


def per_norm(length: Scale, norm: Tensor) -> Tensor:
    """The factor that gives a vector of this norm the wanted length; 0 for the zero vector."""
    return torch.where(norm > 0, length / norm, 0.0)
