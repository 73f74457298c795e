"""Ascents: perturbations that follow a gradient instead of being drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from steppe.noise import Draw
from steppe.perturbations import Gradients, Perturbation, State, check_nonnegative
from steppe.schedules import Strength, check_strength, strength_at
from steppe.slots import local
from steppe.weights import Weights


@dataclass(frozen=True)
class Ascent(Perturbation):
    """SAM's step up the gradient: eps = rho g / ‖g‖ with the norm over all perturbed weights.

    `adaptive` is ASAM's form, invariant to rescaling weights: with T = |w| + eta,
    eps = rho T² g / ‖T g‖.
    """

    rho: Strength
    adaptive: bool = False
    eta: float = 0.0

    needs_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_strength("rho", self.rho)
        check_nonnegative("eta", self.eta)

    def strength(self, step: int) -> float:
        return strength_at(self.rho, step, name="rho")

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        params = [slot.values for slot in weights.moved]
        gradient = [None if g is None else local(g) for g in gradient]
        if self.adaptive:
            gradient = [_times_size(g, p, self.eta) for g, p in zip(gradient, params, strict=True)]
        norm = weights.total_norm(gradient, weights.moved)
        if self.adaptive:
            gradient = [_times_size(g, p, self.eta) for g, p in zip(gradient, params, strict=True)]
        weights.add(gradient, per_norm(draw.sign * self.strength(draw.step), norm))

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        """rho; ASAM's own radius also depends on the gradient, this is the one in scaled space."""
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
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}.")

    def strength(self, step: int) -> float:
        return strength_at(self.rho, step, name="rho")

    def init(self, weights: Weights) -> State:
        return {"momentum": weights.zeros()}

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        v = [m for slot, m in zip(weights.slots, state["momentum"], strict=True) if slot.active]
        norm = weights.total_norm(v, weights.moved)
        weights.add(v, per_norm(-draw.sign * self.strength(draw.step), norm))

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        norm = weights.total_norm(state["momentum"], weights.slots)
        return torch.where(norm > 0, self.strength(step), 0.0)

    def learn(
        self, weights: Weights, state: State, grads: Gradients, scale: Tensor | float
    ) -> None:
        weights.decay_and_add(state["momentum"], grads, self.momentum, scale)


def per_norm(length: float, norm: Tensor) -> Tensor:
    """The factor that gives a vector of this norm the wanted length; 0 for the zero vector."""
    return torch.where(norm > 0, length / norm, 0.0)


def _times_size(grad: Tensor | None, param: Tensor, eta: float) -> Tensor | None:
    """grad * (|w| + eta), in place: the gradient of SAM's first pass serves nothing else."""
    return None if grad is None else grad.mul_(param.abs().add_(eta))
