"""Methods: every algorithm as a tuple of passes (docs/methods.md writes each as a line)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from steppe.perturbations import (
    AdaptiveGaussian,
    Ascent,
    ElementwiseGaussian,
    Gaussian,
    MomentumAscent,
    Perturbation,
)
from steppe.schedules import RISE, Strength, check_number, check_share, needs_steps, with_steps

Feed = Literal["one", "each", "slices"]
"""What `perturber.backward` gives the passes: all the same batch, a batch each, or a slice each."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward at `w + eps`, with a weight. No perturbation: at the true weights."""

    perturbation: Perturbation | None = None
    weight: float = 1.0
    stream: int | None = None
    """Passes with the same stream share one eps; None: a stream of its own."""
    sign: float = 1.0
    fresh: bool = False
    """A new eps for every micro-batch, instead of one per optimizer step."""


@dataclass(frozen=True)
class Method:
    """An algorithm: passes whose weighted gradients add up to what the optimizer sees."""

    name: str
    passes: tuple[Pass, ...]
    feed: Feed = "one"
    same_batch: bool = False
    """The user asked for one batch in all passes, which consecutive micro-batches cannot give."""
    m: int | None = None
    """m-sharpness: `backward` runs all passes on each part of m samples."""
    merged: bool = False
    """Perturb the merged weights of LoRA layers, by noise on their frozen base, and nothing else."""

    def __post_init__(self) -> None:
        for p in self.passes:
            if not (isinstance(p, Pass) and isinstance(p.perturbation, Perturbation | None)):
                raise TypeError(f"A pass is such as steppe.Pass(steppe.Gaussian(0.01)), got {p}.")
        if not self.passes:
            raise ValueError("A method needs at least one pass.")
        total = sum(p.weight for p in self.passes)
        if abs(total - 1) > 1e-6 or any(p.weight < 0 for p in self.passes):
            weights = [p.weight for p in self.passes]
            raise ValueError(f"The weights of a method's passes must add up to 1, got {weights}.")
        first = self.passes[0].perturbation
        if first is not None and first.needs_gradient:
            raise ValueError(f"{first} needs the gradient of a pass before it, but comes first.")

    @property
    def perturbs(self) -> bool:
        return any(p.perturbation is not None for p in self.passes)

    @property
    def has_clean_pass(self) -> bool:
        return any(p.perturbation is None for p in self.passes)

    @property
    def steered(self) -> bool:
        """Whether a loss rise sets the strength."""
        return any(p.perturbation is not None and p.perturbation.steering for p in self.passes)

    @property
    def in_sequence(self) -> bool:
        """Whether a pass needs the gradient of the one before, so that they cannot be parallel."""
        return any(self.scouts(i) for i in range(len(self.passes)))

    @property
    def repeats_batch(self) -> bool:
        """Whether several passes want the same batch, which hooks on an unchanged loop cannot give."""
        return self.in_sequence or self.same_batch

    @property
    def batches_needed(self) -> int:
        """How many batches `perturber.backward` takes."""
        return len(self.passes) if self.feed == "each" else 1

    @property
    def needs_steps(self) -> bool:
        """Whether a schedule in it waits for the length of training."""
        return any(needs_steps(v) for p in self.passes for v in _strengths(p.perturbation).values())

    def scouts(self, index: int) -> bool:
        """Whether the next pass wants this one's gradient."""
        following = self.passes[index + 1 : index + 2]
        return any(p.perturbation is not None and p.perturbation.needs_gradient for p in following)

    def with_steps(self, steps: int) -> Method:
        """The same method with the length of training filled in where a schedule left it open."""

        def filled(p: Pass) -> Pass:
            values = _strengths(p.perturbation)
            if p.perturbation is None or not any(needs_steps(v) for v in values.values()):
                return p
            filled_in = {name: with_steps(value, steps) for name, value in values.items()}
            return replace(p, perturbation=replace(p.perturbation, **filled_in))  # type: ignore[type-var]

        return replace(self, passes=tuple(filled(p) for p in self.passes))


def sgd() -> Method:
    """The baseline: no perturbation, and what every method is at strength zero."""
    return Method("sgd", (Pass(),))


def rwp(
    sigma: Strength | None = None,
    *,
    ratio: Strength | None = None,
    rise: Strength | None = None,
    isotropic: bool = False,
) -> Method:
    """Random weight perturbation: the gradient at w + eps, eps filter-wise Gaussian. One pass.

    Args:
        sigma: std of eps per entry as a part of its filter's norm, at least 0; the paper uses 0.005 to 0.02. This and
            the other strengths, of which one is given, are numbers or schedules (`cosine_increase(0, 0.01, steps)`).
        ratio: length of eps on a filter as a part of the filter's length, at least 0; 0.05 to 0.6 are usual.
        rise: by how much eps may raise the expected training loss, in the loss's unit; the default, see docs/choosing.md.
        isotropic: sigma is the std itself, the same for every weight.

    Examples:
        >>> rwp(0.01).passes
        (Pass(perturbation=Gaussian(sigma=0.01, ratio=None, isotropic=False, rise=None), ...),)
    """
    rise = _given(rise, sigma, ratio)
    return Method("rwp", (Pass(Gaussian(sigma, ratio, isotropic, rise)),))


def arwp(
    sigma: Strength | None = None,
    *,
    ratio: Strength | None = None,
    rise: Strength | None = None,
    eta: float | None = None,
    beta: float = 0.99,
    exponent: float = 0.25,
    elementwise: bool = False,
) -> Method:
    """Adaptive random weight perturbation: less noise where gradients have been large. One pass.

    Args:
        sigma: as in `rwp`, like ratio and rise; with a rise the history v is relative to its mean over all filters.
        eta: how past gradients shrink the noise, by (1 + eta v)^(-exponent): at least 0 (RWP), 0.1 or with a rise 10.
        beta: memory of the history, v <- beta v + ‖g‖², in [0, 1).
        exponent: at least 0; 1/4 is the paper's formula, 1/2 the authors' code.
        elementwise: a history per weight and no filter norms, the paper's first form; needs sigma or rise.
    """
    rise = _given(rise, sigma, ratio)
    if elementwise:
        if ratio is not None:
            raise ValueError("elementwise noise has no filters, so no ratio: give sigma or rise.")
        eta = 0.1 if eta is None else eta
        return Method("arwp", (Pass(ElementwiseGaussian(sigma, eta, beta, exponent, rise)),))
    if eta is None:
        eta = 0.1 if rise is None else 10.0
    noise = AdaptiveGaussian(sigma, ratio, rise=rise, eta=eta, beta=beta, exponent=exponent)
    return Method("arwp", (Pass(noise),))


def mixed(method: Method, lam: float = 0.5, *, same_batch: bool = False) -> Method:
    """A one-pass method mixed with the clean gradient: lam g(w + eps) + (1 - lam) g(w). Two passes.

    Args:
        method: of one pass, such as `rwp()` or `flat_lora()`.
        lam: weight of the perturbed gradient, in [0, 1].
        same_batch: both gradients from one batch (the paper's ablation), not from one each, as two devices can.
    """
    if not isinstance(method, Method):
        raise TypeError(f"mixed() takes a method such as steppe.rwp(), got {method!r}.")
    check_share("lam", lam)
    if len(method.passes) != 1:
        raise ValueError(
            f"mixed() takes a method of one pass, but {method.name} has {len(method.passes)}."
        )
    (perturbed,) = method.passes
    return Method(
        f"m_{method.name}",
        (Pass(weight=1 - lam), replace(perturbed, weight=lam)),
        feed="one" if same_batch else "each",
        same_batch=same_batch,
        merged=method.merged,
    )


def m_rwp(
    sigma: Strength | None = None,
    *,
    ratio: Strength | None = None,
    rise: Strength | None = None,
    isotropic: bool = False,
    lam: float = 0.5,
    same_batch: bool = False,
) -> Method:
    """Mixed RWP: bears stronger noise than RWP, since half of the gradient is clean. Two passes.

    Args:
        sigma: as in `rwp`, like ratio, rise (of the perturbed pass, not of the mixture) and isotropic.
        lam: weight of the perturbed gradient, in [0, 1].
        same_batch: both gradients from one batch; see `mixed`.
    """
    noise = rwp(sigma, ratio=ratio, rise=rise, isotropic=isotropic)
    return mixed(noise, lam, same_batch=same_batch)


def m_arwp(
    sigma: Strength | None = None,
    *,
    ratio: Strength | None = None,
    rise: Strength | None = None,
    eta: float | None = None,
    beta: float = 0.99,
    exponent: float = 0.25,
    elementwise: bool = False,
    lam: float = 0.5,
    same_batch: bool = False,
) -> Method:
    """Mixed ARWP: at or above SAM in 10 of the paper's 12 cells. Two passes, parallel on two devices.

    Args:
        sigma: as in `rwp`, like ratio and rise (of the perturbed pass, not of the mixture).
        eta: as in `arwp`, like beta, exponent and elementwise.
        lam: weight of the perturbed gradient, in [0, 1].
        same_batch: both gradients from one batch; see `mixed`.
    """
    shape = {"eta": eta, "beta": beta, "exponent": exponent}
    method = arwp(sigma, ratio=ratio, rise=rise, **shape, elementwise=elementwise)  # type: ignore[arg-type]
    return mixed(method, lam, same_batch=same_batch)


def sam(
    rho: Strength | None = None,
    m: int | None = None,
    same_batch: bool = True,
    *,
    rise: Strength | None = None,
) -> Method:
    """Sharpness-aware minimization: the gradient at w + rho g/‖g‖. Two passes, in sequence.

    Args:
        rho: length of the ascent step, at least 0.
        m: m-sharpness: each part of m samples has an ascent of its own; at least 1.
        same_batch: False takes the two gradients from different batches, which hurts (paper, batch ablation).
        rise: in place of rho: rho = rise / ‖g‖, at most 0.5. In the loss's unit.
    """
    if m is not None and not (isinstance(m, int) and m >= 1 and same_batch):
        problem = f"got m={m!r}" if same_batch else "and m-sharpness needs same_batch=True"
        raise ValueError(f"m is the number of samples in a part, at least 1, {problem}.")
    return Method(
        "sam",
        (Pass(weight=0.0), Pass(Ascent(0.05 if rho is rise is None else rho, rise=rise))),
        feed="one" if same_batch else "each",
        m=m,
    )


def asam(rho: Strength | None = None, eta: float = 0.01, *, rise: Strength | None = None) -> Method:
    """Adaptive SAM: the ascent scaled by |w| + eta, so that rescaled layers look the same.

    Args:
        rho: length of the ascent step in weights divided by their size T = |w| + eta, at least 0.
        eta: added to the size of each weight, at least 0.
        rise: in place of rho: rho = rise / ‖T g‖, at most 5. In the loss's unit.
    """
    rho = 0.5 if rho is rise is None else rho
    ascent = Ascent(rho, adaptive=True, eta=eta, rise=rise)
    return Method("asam", (Pass(weight=0.0), Pass(ascent)))


def lpf_sgd(
    sigma: Strength | None = None, samples: int = 8, *, rise: Strength | None = None
) -> Method:
    """LPF-SGD: the batch in `samples` slices, each at its own w + eps.

    Args:
        sigma: std of eps per entry as a part of its filter's norm, at least 0.
        samples: slices of the batch, at least 1.
        rise: as in `rwp`, in place of sigma.
    """
    check_number("samples", samples, whole=True)
    one = Pass(Gaussian(sigma, rise=_given(rise, sigma)), weight=1 / samples, fresh=True)
    return Method("lpf_sgd", (one,) * samples, feed="slices")


def antithetic_rwp(
    sigma: Strength | None = None,
    *,
    ratio: Strength | None = None,
    rise: Strength | None = None,
    isotropic: bool = False,
) -> Method:
    """RWP at w + eps and at w - eps: the odd part of the noise cancels. Two passes, one batch.

    Args:
        sigma: as in `rwp`, like ratio, rise and isotropic.
    """
    noise = Gaussian(sigma, ratio, isotropic, _given(rise, sigma, ratio))
    pair = tuple(Pass(noise, weight=0.5, stream=0, sign=sign) for sign in (1.0, -1.0))
    return Method("antithetic_rwp", pair)


def msam(rho: Strength = 0.05, momentum: float = 0.9) -> Method:
    """Momentum SAM: the perturbation is the momentum of past gradients. One pass.

    Args:
        rho: length of the step against the momentum, at least 0.
        momentum: memory of the gradients, v <- momentum v + g, in [0, 1).
    """
    return Method("msam", (Pass(MomentumAscent(rho, momentum)),))


def flat_lora(*, ratio: Strength | None = None, rise: Strength | None = None) -> Method:
    """Flat-LoRA: RWP on the merged weights W + s B A of a PEFT model; A and B alone are trained. One pass.

    The noise is on the frozen base, with a std from the rows of the merged weight, out of place: the base
    is neither written nor copied.

    Args:
        ratio: length of the noise on a row as a part of the merged row's length, at least 0; the paper's unit.
        rise: by how much the noise may raise the expected training loss; the default, see docs/choosing.md.
    """
    noise = Gaussian(ratio=ratio, rise=_given(rise, ratio))
    return Method("flat_lora", (Pass(noise),), merged=True)


def _given(rise: Strength | None, *fixed: Strength | None) -> Strength | None:
    """The rise, which is the default one where no strength is given at all."""
    return RISE if rise is None and all(value is None for value in fixed) else rise


def _strengths(perturbation: Perturbation | None) -> dict[str, Strength | None]:
    """The fields of a perturbation that may hold a schedule."""
    values = vars(perturbation) if perturbation else {}
    return {name: value for name, value in values.items() if callable(value)}
