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
from steppe.schedules import Strength, check_number, strength_at
from steppe.strength import Steering, one_strength
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

    @property
    def steering(self) -> Steering | None:
        """Set where a loss rise is given: eps has relative displacement 1 then, times `weights.gain`."""
        return None

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
    ratio ‖w_j‖ whatever the layer's size. `rise` lets the ratio follow the loss rise that is asked
    for (`steppe.strength`). `isotropic`: std = sigma for every weight.
    """

    sigma: Strength | None = None
    ratio: Strength | None = None
    isotropic: bool = False
    rise: Strength | None = None

    def __post_init__(self) -> None:
        one_strength(sigma=self.sigma, ratio=self.ratio, rise=self.rise)
        if self.isotropic and self.ratio is not None:
            raise ValueError("isotropic noise has no filters to be in ratio to: give sigma.")

    @property
    def steering(self) -> Steering | None:
        return None if self.rise is None else Steering(self.rise)

    def strength(self, step: int) -> float:
        name = one_strength(sigma=self.sigma, ratio=self.ratio, rise=self.rise)
        return strength_at(getattr(self, name), step, name=name)

    def std(self, weights: Weights, state: State, step: int) -> Tensor:
        """The std of the noise, one number per filter; with a rise, at relative displacement 1."""
        if self.rise is not None:
            return even_std(weights) if self.isotropic else weights.norms_per_entry()
        strength = self.strength(step)
        if self.isotropic:
            return torch.full_like(weights.sizes, strength)
        if self.ratio is not None:
            return strength * weights.norms_per_entry()
        return strength * weights.filter_norms()

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
        """(1 + eta v_j)^(-exponent): how much of the noise is left, per filter.

        With a rise, v_j is taken relative to its mean over all filters, whatever the loss's unit, and
        the factor to its own: it shapes the noise, and the rise alone sets its size.
        """
        (history,) = state["history"]
        if self.rise is None:
            return (1 + self.eta * history).pow(-self.exponent)
        shape = torch.add(history.mean(), history, alpha=self.eta).clamp_(min=1e-30)
        shape = shape.pow_(-self.exponent)
        return shape.div_(shape.mean())

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
        finite = squares.sum() < torch.inf
        history.copy_(torch.where(finite, self.beta * history + squares, history))

    def stats(self, state: State) -> dict[str, float]:
        return {"factor": float(self.factor(state).median())}


@dataclass(frozen=True)
class ElementwiseGaussian(Perturbation):
    """The paper's first adaptive form: variance sigma² / sqrt(1 + eta v) per element, no norms.

    The history is as large as the weights, which costs a second extra copy of them.
    """

    sigma: Strength | None = None
    eta: float = 0.1
    beta: float = 0.99
    exponent: float = 0.25
    rise: Strength | None = None

    learns_from: ClassVar[Literal["nothing", "step", "pass"]] = "pass"

    def __post_init__(self) -> None:
        one_strength(sigma=self.sigma, rise=self.rise)
        check_adaptive(self.eta, self.beta, self.exponent)

    @property
    def steering(self) -> Steering | None:
        return None if self.rise is None else Steering(self.rise)

    def strength(self, step: int) -> float:
        name = one_strength(sigma=self.sigma, rise=self.rise)
        return strength_at(getattr(self, name), step, name=name)

    def _std(self, weights: Weights, step: int) -> Tensor:
        if self.rise is not None:
            return even_std(weights)
        return torch.full_like(weights.sizes, self.strength(step))

    def init(self, weights: Weights) -> State:
        return {"history": weights.zeros()}

    def factor(self, history: Tensor) -> Tensor:
        return (1 + self.eta * history).pow_(-self.exponent)

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        std = self._std(weights, draw.step)
        weights.add_noise(draw, std, self.factor, of=state["history"])

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        strengths = weights.per_parameter(weights.strengths())
        pairs = zip(strengths, state["history"], strict=True)
        factors = [s[:1] * self.factor(local(h)) for s, h in pairs]
        return self._std(weights, step)[0] * weights.total_norm(factors, weights.params)

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


def even_std(weights: Weights) -> Tensor:
    """One std for every weight, such that ‖eps‖ is about ‖w‖."""
    norm, size = torch.linalg.vector_norm(weights.filter_norms()), weights.sizes.sum()
    std: Tensor = (norm * size.rsqrt()).expand_as(weights.sizes)
    return std


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
    check_number("beta", beta)
    if not 0 <= beta < 1:
        raise ValueError(f"beta must be in [0, 1), got {beta}.")


def check_nonnegative(name: str, value: float) -> None:
    check_number(name, value)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be finite and at least 0, got {value}.")
