"""Perturbations: how eps is drawn, and what it learns from gradients.

A perturbation is a rule (a frozen dataclass); what it remembers between steps is its state, a
dictionary of tensors that is allocated when it is attached and passed in at every call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from steppe.layout import filter_norms, local
from steppe.noise import Draw
from steppe.schedules import Strength, check_strength, strength_at
from steppe.weights import Weights

State: TypeAlias = dict[str, list[Tensor]]
Gradients: TypeAlias = Sequence[Tensor | None]
Scale: TypeAlias = Tensor | float

_SEVERAL = "learns_from = 'pass' in a method of several passes needs it"


class Perturbation(ABC):
    """Base of all perturbations: say how strong, and move the weights by eps.

    Training needs `strength` and `move`. What raises below is needed by some alone, and says by whom.
    """

    needs_gradient: ClassVar[bool] = False
    """True if `move` wants the gradient of the pass before it (SAM): such passes run in sequence."""
    learns_from: ClassVar[Literal["nothing", "step", "pass"]] = "nothing"
    """Whose gradients `learn` wants: the optimizer's at each step, or those of its own pass (the
    same thing where a step has one pass)."""

    @abstractmethod
    def strength(self, step: int) -> float:
        """The strength at an optimizer step. Where it is 0, the weights are not moved at all."""

    @abstractmethod
    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        """Add eps to the weights, by `weights.add_noise` or `weights.add`.

        `gradient` holds the gradient of the pass before, in the order of the moved parameters, if
        `needs_gradient`; otherwise it is empty.
        """

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        """The expected ‖eps‖, for `print(perturber)` and `stats()`."""
        raise self._missing("radius(): print(perturber) and stats() need it")

    def init(self, weights: Weights) -> State:
        """What this perturbation remembers, before the first step."""
        return {}

    def learn(self, weights: Weights, state: State, grads: Gradients, scale: Scale) -> None:
        """Learn from the gradients that the optimizer is about to see, each times `scale`."""
        raise self._missing("learn(): learns_from needs it")

    def collect(self, grad: Tensor, noted: Tensor | None) -> Tensor:
        """Note what `learn_noted` will need of one parameter's gradient in one pass of several."""
        raise self._missing(f"collect(): {_SEVERAL}")

    def collect_all(self, weights: Weights, grads: Gradients, noted: Gradients) -> Gradients:
        """`collect` for each of `weights.params`, with the notes (none in the first) of passes before."""
        pairs = zip(grads, noted or [None] * len(grads), strict=True)
        return [old if grad is None else self.collect(grad, old) for grad, old in pairs]

    def learn_noted(self, weights: Weights, state: State, notes: Gradients, scale: Scale) -> None:
        """Learn from the notes of all of a step's perturbed passes, gradients times `scale`."""
        raise self._missing(f"learn_noted(): {_SEVERAL}")

    def stats(self, state: State) -> dict[str, float]:
        """Numbers worth logging; called only when the user asks."""
        return {}

    def _missing(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} must define {what}.")


@dataclass(frozen=True)
class Gaussian(Perturbation):
    """Noise in proportion to each filter's norm: std = sigma ‖w_j‖ (paper, section 4).

    `sigma` multiplies the norm per entry, as in the paper. `ratio` fixes the relative displacement
    instead, sigma_j = ratio / sqrt(d_j) for a filter of d_j entries, so that ‖eps_j‖ is about
    ratio ‖w_j‖ whatever the layer's size. `isotropic`: std = sigma for every weight.
    """

    sigma: Strength | None = None
    ratio: Strength | None = None
    isotropic: bool = False

    def __post_init__(self) -> None:
        if self.sigma is not None and self.ratio is not None:
            raise ValueError(
                f"Give sigma or ratio, not both (got sigma={self.sigma}, ratio={self.ratio})."
            )
        if self.sigma is None and self.ratio is None:
            raise ValueError(f"{type(self).__name__} needs a strength: give sigma or ratio.")
        if self.isotropic and self.ratio is not None:
            raise ValueError("isotropic noise has no filters to be in ratio to: give sigma.")
        for name in ("sigma", "ratio"):
            if (value := getattr(self, name)) is not None:
                check_strength(name, value)

    def strength(self, step: int) -> float:
        if self.sigma is not None:
            return strength_at(self.sigma, step, name="sigma")
        assert self.ratio is not None
        return strength_at(self.ratio, step, name="ratio")

    def std(self, weights: Weights, state: State, step: int) -> Tensor:
        """The std of the noise, one number per filter."""
        strength = self.strength(step)
        if self.isotropic:
            return torch.full_like(weights.sizes, strength)
        per_entry = strength if self.ratio is None else strength * weights.sizes.rsqrt()
        return weights.filter_norms() * per_entry

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        weights.add_noise(draw, self.std(weights, state, draw.step))

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        std = self.std(weights, state, step) * weights.strengths()
        return (weights.sizes * std.square()).sum().sqrt()


@dataclass(frozen=True)
class AdaptiveGaussian(Gaussian):
    """Gaussian noise that shrinks where gradients have been large (paper, section 4.2).

    std = sigma ‖w_j‖ (1 + eta v_j)^(-exponent) with the history v_j <- beta v_j + ‖g_j‖². As
    printed in the paper the *variance* is divided by sqrt(1 + eta v_j), hence exponent 1/4; the
    authors' released code divides the std by it: exponent 1/2.
    """

    eta: float = 0.1
    beta: float = 0.99
    exponent: float = 0.25

    learns_from: ClassVar[Literal["nothing", "step", "pass"]] = "pass"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adaptive(self.eta, self.beta, self.exponent)

    def init(self, weights: Weights) -> State:
        return {"history": [torch.zeros_like(weights.sizes)]}

    def std(self, weights: Weights, state: State, step: int) -> Tensor:
        return super().std(weights, state, step) * self.factor(state)

    def factor(self, state: State) -> Tensor:
        """(1 + eta v_j)^(-exponent): how much of the plain noise is left, per filter."""
        return (1 + self.eta * state["history"][0]).pow(-self.exponent)

    def collect(self, grad: Tensor, noted: Tensor | None) -> Tensor:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        squared = filter_norms(grad, dtype).square()
        return squared if noted is None else noted + squared

    def collect_all(self, weights: Weights, grads: Gradients, noted: Gradients) -> Gradients:
        if weights.shards.several:  # gradients of single passes are whole there, not sharded
            return super().collect_all(weights, grads, noted)
        return added(noted, weights.per_parameter(weights.filter_norms(grads).square()))

    def learn_noted(self, weights: Weights, state: State, notes: Gradients, scale: Scale) -> None:
        self._learn_squares(state, weights.per_filter(notes), scale)

    def learn(self, weights: Weights, state: State, grads: Gradients, scale: Scale) -> None:
        self._learn_squares(state, weights.filter_norms(grads).square(), scale)

    def _learn_squares(self, state: State, squares: Tensor, scale: Scale) -> None:
        """A step with any non-finite gradient is dropped whole, without asking the device."""
        (history,) = state["history"]
        squares = squares * (scale * scale)
        history.copy_(torch.where(squares.sum().isfinite(), self.beta * history + squares, history))

    def stats(self, state: State) -> dict[str, float]:
        return {"factor": float(self.factor(state).median())}


@dataclass(frozen=True)
class ElementwiseGaussian(Perturbation):
    """The paper's first adaptive form: variance sigma² / sqrt(1 + eta v) per element, no norms.

    The history is as large as the weights, which costs a second extra copy of them.
    """

    sigma: Strength
    eta: float = 0.1
    beta: float = 0.99
    exponent: float = 0.25

    learns_from: ClassVar[Literal["nothing", "step", "pass"]] = "pass"

    def __post_init__(self) -> None:
        check_strength("sigma", self.sigma)
        check_adaptive(self.eta, self.beta, self.exponent)

    def strength(self, step: int) -> float:
        return strength_at(self.sigma, step, name="sigma")

    def init(self, weights: Weights) -> State:
        return {"history": weights.zeros()}

    def factor(self, history: Tensor) -> Tensor:
        return (1 + self.eta * history).pow_(-self.exponent)

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        std = torch.full_like(weights.sizes, self.strength(draw.step))
        weights.add_noise(draw, std, self.factor, of=state["history"])

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        strengths = weights.per_parameter(weights.strengths())
        pairs = zip(strengths, state["history"], strict=True)
        factors = [s[:1] * self.factor(local(h)) for s, h in pairs]
        return self.strength(step) * weights.total_norm(factors, weights.params)

    def collect(self, grad: Tensor, noted: Tensor | None) -> Tensor:
        squared = local(grad).to(torch.promote_types(grad.dtype, torch.float32)).square()
        return squared if noted is None else noted.add_(squared)

    def collect_all(self, weights: Weights, grads: Gradients, noted: Gradients) -> Gradients:
        found = [local(g) for g in grads if g is not None]
        wide = [g if g.dtype.itemsize >= 4 else g.float() for g in found]
        squares = iter(torch._foreach_mul(wide, wide) if wide else ())
        return added(noted, [None if g is None else next(squares) for g in grads])

    def learn_noted(self, weights: Weights, state: State, notes: Gradients, scale: Scale) -> None:
        weights.decay_and_add(state["history"], notes, self.beta, scale * scale)

    def learn(self, weights: Weights, state: State, grads: Gradients, scale: Scale) -> None:
        weights.decay_and_add(state["history"], grads, self.beta, scale * scale, square=True)

    def stats(self, state: State) -> dict[str, float]:
        values = torch.cat([self.factor(local(h)).flatten() for h in state["history"]])
        return {"factor": float(values.median())}


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
        weights.add(gradient, per_norm(draw.sign * self.strength(draw.step), norm), uphill=True)

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
        v = [m for p, m in zip(weights.params, state["momentum"], strict=True) if p.active]
        norm = weights.total_norm(v, weights.moved)
        weights.add(v, per_norm(-draw.sign * self.strength(draw.step), norm), uphill=True)

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        norm = weights.total_norm(state["momentum"], weights.params)
        return torch.where(norm > 0, self.strength(step), 0.0)

    def learn(self, weights: Weights, state: State, grads: Gradients, scale: Scale) -> None:
        weights.decay_and_add(state["momentum"], grads, self.momentum, scale)


def per_norm(length: float, norm: Tensor) -> Tensor:
    """The factor that gives a vector of this norm the wanted length; 0 for the zero vector."""
    return torch.where(norm > 0, length / norm, 0.0)


def added(noted: Gradients, new: Gradients) -> Gradients:
    """Both lists together, entry by entry, where there is something (`noted` may be empty)."""
    if not noted:
        return new
    pairs = list(zip(noted, new, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    sums = iter(torch._foreach_add([a for a, _ in both], [b for _, b in both]) if both else ())
    return [b if a is None else a if b is None else next(sums) for a, b in pairs]


def check_adaptive(eta: float, beta: float, exponent: float) -> None:
    check_nonnegative("eta", eta)
    check_nonnegative("exponent", exponent)
    if not 0 <= beta < 1:
        raise ValueError(f"beta must be in [0, 1), got {beta}.")


def check_nonnegative(name: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be finite and at least 0, got {value}.")
