"""Perturbations: how eps is drawn or follows a gradient, and what it learns from gradients.

A perturbation is a rule (a frozen dataclass); what it remembers between steps is its state, a
dictionary of tensors that is allocated when it is attached and passed in at every call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from steppe.distributed import local
from steppe.noise import Draw, Gradients, filter_squares
from steppe.schedules import (
    Steering,
    Strength,
    check_nonnegative,
    check_share,
    one_strength,
    strength_at,
)
from steppe.weights import Weights

State: TypeAlias = dict[str, list[Tensor]]
Scale: TypeAlias = Tensor | float
LearnsFrom: TypeAlias = Literal["nothing", "step", "pass"]

_SEVERAL = "learns_from = 'pass' in a method of several passes needs it"


class Perturbation(ABC):
    """Base of all perturbations. Training needs `strength` and `move`; what raises says who needs it."""

    needs_gradient: ClassVar[bool] = False
    """True if `move` wants the gradient of the pass before it (SAM): such passes run in sequence."""
    learns_from: ClassVar[LearnsFrom] = "nothing"
    """Whose gradients `learn` wants: the optimizer's at each step, or those of its own pass (the
    same thing where a step has one pass)."""
    elementwise: ClassVar[bool] = False
    """True if `collect` notes something for each weight: more than ranks should exchange."""

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
        """The expected ‖eps‖, for `print(perturber)` and `stats()`. NaN: it is not known."""
        return torch.tensor(torch.nan)

    def init(self, weights: Weights) -> State:
        """What this perturbation remembers, before the first step."""
        return {}

    def learn(self, weights: Weights, state: State, grads: Gradients, scale: Scale) -> None:
        """Learn from the gradients that the optimizer is about to see, each times `scale`."""
        raise self._missing("learn(): learns_from needs it")

    def collect(self, weights: Weights, grads: Gradients, scale: float) -> Gradients:
        """Notes for `learn_noted` of one pass of several, its gradients times `scale`; they are added up."""
        raise self._missing(f"collect(): {_SEVERAL}")

    def learn_noted(self, weights: Weights, state: State, notes: Gradients, scale: Scale) -> None:
        """Learn from the notes of all of a step's perturbed passes, gradients times `scale`."""
        raise self._missing(f"learn_noted(): {_SEVERAL}")

    def stats(self, state: State) -> dict[str, float]:
        """Numbers worth logging; called only when the user asks."""
        return {}

    def _missing(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} must define {what}.")


class OneStrength(Perturbation):
    """A perturbation with one strength out of its fields sigma, ratio, rho and rise."""

    _name: str

    def __post_init__(self) -> None:
        names = [name for name in ("sigma", "ratio", "rho", "rise") if name in vars(self)]
        vars(self)["_name"] = one_strength(**{name: vars(self)[name] for name in names})

    def strength(self, step: int) -> float:
        return strength_at(vars(self)[self._name], step, name=self._name)

    @property
    def steering(self) -> Steering | None:
        rise: Strength | None = vars(self).get("rise")
        return None if rise is None else Steering(rise, linear=self.needs_gradient)

    def even_std(self, weights: Weights, step: int) -> Tensor:
        """One std for every weight: sigma; with a rise, such that ‖eps‖ is about ‖w‖."""
        std = weights.norm_per_entry() if self.steering else self.strength(step)
        return weights.sizes.new_ones(()).mul(std).expand_as(weights.sizes)


@dataclass(frozen=True)
class Gaussian(OneStrength):
    """Noise in proportion to each filter's norm: std = sigma ‖w_j‖ (paper, section 4).

    `sigma` multiplies the norm per entry, as in the paper. `ratio` fixes the relative displacement
    instead, sigma_j = ratio / sqrt(d_j) for a filter of d_j entries, so that ‖eps_j‖ is about
    ratio ‖w_j‖ whatever the layer's size. `rise` lets the ratio follow the loss rise that is asked
    for (`steppe.schedules`). `isotropic`: std = sigma for every weight.
    """

    sigma: Strength | None = None
    ratio: Strength | None = None
    isotropic: bool = False
    rise: Strength | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.isotropic and self.ratio is not None:
            raise ValueError("isotropic noise has no filters to be in ratio to: give sigma.")

    def std(self, weights: Weights, state: State, step: int) -> Tensor:
        """The std of the noise, one number per filter; with a rise, at relative displacement 1."""
        if self.isotropic:
            return self.even_std(weights, step)
        norms = weights.norms_per_entry() if self.sigma is None else weights.filter_norms()
        return norms if self.rise is not None else self.strength(step) * norms

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        weights.add_noise(draw, self.std(weights, state, draw.step))

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        std = self.std(weights, state, step) * weights.strengths()
        return (weights.sizes * std.square()).sum().sqrt()


class Adaptive(OneStrength):
    """Shrinks where gradients have been large: by (1 + eta v)^(-exponent), v a history of squares."""

    eta: float
    beta: float
    exponent: float

    learns_from: ClassVar[LearnsFrom] = "pass"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative("eta", self.eta)
        check_nonnegative("exponent", self.exponent)
        check_share("beta", self.beta, below=True)

    def left(self, history: Tensor) -> Tensor:
        """How much of the noise is left."""
        return (1 + self.eta * history).pow_(-self.exponent)


@dataclass(frozen=True)
class AdaptiveGaussian(Adaptive, Gaussian):
    """Gaussian noise that shrinks where gradients have been large (paper, section 4.2).

    std = sigma ‖w_j‖ (1 + eta v_j)^(-exponent) with the history v_j <- beta v_j + ‖g_j‖². As
    printed in the paper the *variance* is divided by sqrt(1 + eta v_j), hence exponent 1/4; the
    authors' released code divides the std by it: exponent 1/2.
    """

    eta: float = 0.1
    beta: float = 0.99
    exponent: float = 0.25

    def init(self, weights: Weights) -> State:
        return {"history": [torch.zeros_like(weights.sizes)]}

    def std(self, weights: Weights, state: State, step: int) -> Tensor:
        return super().std(weights, state, step) * self.factor(state)

    def factor(self, state: State) -> Tensor:
        """(1 + eta v_j)^(-exponent) per filter. With a rise, v_j and the factor are relative to their
        means over all filters: whatever the loss's unit, and the rise alone sets the noise's size."""
        (history,) = state["history"]
        if self.rise is None:
            return self.left(history)
        shape = torch.add(history.mean(), history, alpha=self.eta).clamp_(min=1e-30)
        return shape.pow_(-self.exponent).div_(shape.mean())

    def collect(self, weights: Weights, grads: Gradients, scale: float) -> Gradients:
        if weights.shards.several:  # gradients of single passes are whole there, not sharded
            return [None if g is None else filter_squares(g) * scale**2 for g in grads]
        return weights.per_parameter((weights.filter_norms(grads) * scale).square_())

    def learn_noted(self, weights: Weights, state: State, notes: Gradients, scale: Scale) -> None:
        self._learn(weights.per_filter(notes), state["history"][0], scale)

    def learn(self, weights: Weights, state: State, grads: Gradients, scale: Scale) -> None:
        self._learn(weights.filter_norms(grads).square(), state["history"][0], scale)

    def _learn(self, squares: Tensor, history: Tensor, scale: Scale) -> None:
        squares = squares * (scale * scale)  # a step that is not finite is dropped whole
        finite = squares.sum() < torch.inf
        history.copy_(torch.where(finite, self.beta * history + squares, history))

    def stats(self, state: State) -> dict[str, float]:
        return {"factor": float(self.factor(state).median())}


@dataclass(frozen=True)
class ElementwiseGaussian(Adaptive):
    """The paper's first adaptive form: variance sigma² / sqrt(1 + eta v) per element, no norms.
    The history is a second extra copy of the weights."""

    elementwise: ClassVar[bool] = True

    sigma: Strength | None = None
    eta: float = 0.1
    beta: float = 0.99
    exponent: float = 0.25
    rise: Strength | None = None

    def init(self, weights: Weights) -> State:
        return {"history": weights.zeros()}

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        std = self.even_std(weights, draw.step)
        weights.add_noise(draw, std, self.left, of=state["history"])

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        strengths = weights.per_parameter(weights.strengths())
        pairs = zip(strengths, state["history"], strict=True)
        factors = [self.left(local(h)) * s[0] if h.numel() else h for s, h in pairs]
        return self.even_std(weights, step)[0] * weights.total_norm(factors, weights.params)

    def collect(self, weights: Weights, grads: Gradients, scale: float) -> Gradients:
        found = [local(g) for g in grads if g is not None]
        wide = [g if g.dtype.itemsize >= 4 else g.float() for g in found]
        squares = list(torch._foreach_mul(wide, wide)) if wide else []
        if squares and scale != 1:
            torch._foreach_mul_(squares, scale**2)
        each = iter(squares)
        return [None if g is None else next(each) for g in grads]

    def learn_noted(self, weights: Weights, state: State, notes: Gradients, scale: Scale) -> None:
        weights.decay_and_add(state["history"], notes, self.beta, scale * scale)

    def learn(self, weights: Weights, state: State, grads: Gradients, scale: Scale) -> None:
        weights.decay_and_add(state["history"], grads, self.beta, scale * scale, square=True)

    def stats(self, state: State) -> dict[str, float]:
        values = torch.cat([self.left(local(h)).flatten() for h in state["history"]])
        return {"factor": float(values.median())}


@dataclass(frozen=True)
class Ascent(OneStrength):
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
        super().__post_init__()
        check_nonnegative("eta", self.eta)

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        gradient = [None if g is None else local(g) for g in gradient]
        pairs = zip(gradient, weights.moved, strict=True)
        scaled = [(g, p.values) for g, p in pairs if g is not None and self.adaptive]
        if scaled:  # in place: the gradient of SAM's first pass serves nothing else
            sizes = torch._foreach_abs([w for _, w in scaled])
            torch._foreach_add_(sizes, self.eta)
            torch._foreach_mul_([g for g, _ in scaled], sizes)
        norm = weights.total_norm(gradient, weights.moved)
        if scaled:
            torch._foreach_mul_([g for g, _ in scaled], sizes)
        length: Scale = self.strength(draw.step)
        if weights.gain is not None:  # of a rise: ten times the usual rho at most
            length = (length * weights.gain / norm).clamp(max=5.0 if self.adaptive else 0.5)
        weights.add(gradient, per_norm(draw.sign * length, norm), uphill=True)

    def radius(self, weights: Weights, state: State, step: int) -> Tensor:
        """rho; of ASAM the radius in scaled space. With a rise, rho is known in a step alone."""
        return weights.sizes.new_tensor(self.strength(step) if self.rise is None else torch.nan)


@dataclass(frozen=True)
class MomentumAscent(OneStrength):
    """MSAM: eps = -rho v / ‖v‖ with v <- momentum v + g over the optimizer's gradients.

    v is kept here, so that every optimizer will do: a second copy of the weights. At first eps = 0.
    """

    rho: Strength
    momentum: float = 0.9

    learns_from: ClassVar[LearnsFrom] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("momentum", self.momentum, below=True)

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


def added(noted: Gradients, new: Gradients) -> Gradients:
    """Both lists together, entry by entry, where there is something (`noted` may be empty)."""
    if not noted:
        return new
    pairs = list(zip(noted, new, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    sums = iter(torch._foreach_add([a for a, _ in both], [b for _, b in both]) if both else ())
    return [b if a is None else a if b is None else next(sums) for a, b in pairs]


def per_norm(length: Scale, norm: Tensor) -> Tensor:
    """The factor that gives a vector of this norm the wanted length; 0 for the zero vector."""
    return torch.where(norm > 0, length / norm, 0.0)
