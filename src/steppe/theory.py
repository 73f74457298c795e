"""The paper's bounds as functions: smoothness, convergence, and the trade-off between them.

The loss L is alpha-Lipschitz and beta-smooth with d parameters, a batch gradient has variance of
at most M, and the perturbation is isotropic with standard deviation sigma. `lam = 1` is RWP,
anything below is m-RWP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from steppe.schedules import check_nonnegative, check_share


def bayes_smoothness(alpha: float, beta: float, sigma: float) -> float:
    """Smoothness of the Bayes loss `E L(w + eps)`: `min(alpha / sigma, beta)` (Theorem 1).

    Examples:
        >>> bayes_smoothness(alpha=1.0, beta=10.0, sigma=0.2)
        5.0
    """
    return mixed_smoothness(alpha, beta, sigma, lam=1.0)


def mixed_smoothness(alpha: float, beta: float, sigma: float, lam: float) -> float:
    """Smoothness of `lam E L(w + eps) + (1 - lam) L(w)` (Theorem 3).

    `min(lam alpha / sigma + (1 - lam) beta, beta)`.

    Examples:
        >>> mixed_smoothness(alpha=1.0, beta=10.0, sigma=0.2, lam=0.5)
        7.5
    """
    _check(alpha=alpha, beta=beta)
    check_nonnegative("sigma", sigma)
    check_share("lam", lam)
    if sigma == 0 or lam == 0:
        return beta
    return min(lam * alpha / sigma + (1 - lam) * beta, beta)


def noise_floor(beta: float, sigma: float, d: int, lam: float = 1.0) -> float:
    """What the gradient bound does not fall below: `2 beta² lam² sigma² d`.

    Examples:
        >>> noise_floor(beta=2.0, sigma=0.25, d=8, lam=0.5)
        1.0
    """
    _check(beta=beta, d=d)
    check_nonnegative("sigma", sigma)
    check_share("lam", lam)
    return 2 * (beta * lam * sigma) ** 2 * d


def batch_factor(lam: float, *, same_batch: bool = False) -> float:
    """The share of one batch's variance that is left: `2 lam² - 2 lam + 1`, or 1 on one batch.

    At `lam = 1/2` it is 1/2, exactly what the baseline gains from a doubled batch.

    Examples:
        >>> batch_factor(0.5), batch_factor(0.5, same_batch=True)
        (0.5, 1.0)
    """
    check_share("lam", lam)
    return 1.0 if same_batch else 2 * lam**2 - 2 * lam + 1


def gradient_bound(
    steps: int,
    *,
    gap: float,
    gamma0: float,
    beta: float,
    M: float,
    sigma: float,
    d: int,
    lam: float = 1.0,
    same_batch: bool = False,
    exact_sum: bool = False,
) -> float:
    """The bound on the mean of `‖grad L(w_t)‖²` over T steps (Theorems 2 and 4).

    `2 gap / (gamma0 sqrt T) + [2 beta M f + beta³ lam² sigma² d] gamma0 log T / sqrt T
    + 2 beta² lam² sigma² d`, with `gap = L(w_0) - L*`, step sizes `gamma0 / sqrt t`,
    `gamma0 < 1 / beta`, and f the `batch_factor`. The printed `log T` stands for the sum of 1/t up
    to T, which is larger by up to 1; `exact_sum=True` uses the sum, and is what holds for every T.

    Examples:
        >>> round(gradient_bound(100, gap=1, gamma0=0.5, beta=1, M=1, sigma=0.1, d=10), 4)
        1.0835
    """
    _check(steps=steps, gamma0=gamma0, beta=beta, d=d)
    for name, value in {"gap": gap, "M": M, "sigma": sigma}.items():
        check_nonnegative(name, value)
    if gamma0 * beta >= 1:
        raise ValueError(
            f"The bound needs gamma0 < 1/beta; got gamma0={gamma0} and 1/beta={1 / beta:.6g}. "
            "Lower gamma0."
        )
    noise = (lam * sigma) ** 2 * d
    variance = 2 * beta * M * batch_factor(lam, same_batch=same_batch) + beta**3 * noise
    growth = math.fsum(1 / t for t in range(1, steps + 1)) if exact_sum else math.log(steps)
    root = math.sqrt(steps)
    return (
        2 * gap / (gamma0 * root)
        + variance * gamma0 * growth / root
        + noise_floor(beta, sigma, d, lam)
    )


@dataclass(frozen=True)
class Lemma:
    """What mixing gains at an equal noise floor (Lemma 1): see `lemma`.

    The Bayes loss at `sigma` and the mixed loss at `sigma / lam` have the same noise floor.
    `lam_range` holds the lam for which the mixed loss is the smoother one.
    """

    alpha: float
    beta: float
    sigma: float
    lam_range: tuple[float, float]

    @property
    def bayes(self) -> float:
        """Smoothness of the Bayes loss at sigma."""
        return bayes_smoothness(self.alpha, self.beta, self.sigma)

    def mixed(self, lam: float) -> float:
        """Smoothness of the mixed loss at `sigma / lam`."""
        check_share("lam", lam)
        if lam == 0:
            return self.beta
        return mixed_smoothness(self.alpha, self.beta, self.sigma / lam, lam)

    @property
    def best_lam(self) -> float:
        """The lam for which the mixed loss is smoothest, `beta sigma / 2 alpha`.

        It minimises `lam² alpha / sigma + (1 - lam) beta`. (Not in the paper; a derivative.)
        """
        return self.beta * self.sigma / (2 * self.alpha)


def lemma(alpha: float, beta: float, sigma: float) -> Lemma:
    """Lemma 1: if `alpha < beta sigma < 2 alpha`, mixing is smoother at the same noise floor.

    1) The Bayes loss at sigma is smoother than L; 2) the mixed loss at `sigma / lam` with lam in
    `((beta sigma - alpha) / alpha, 1)` is smoother than the Bayes loss at sigma.

    Examples:
        >>> case = lemma(alpha=1.0, beta=10.0, sigma=0.15)
        >>> case.lam_range, round(case.bayes, 3), round(case.mixed(case.best_lam), 3)
        ((0.5, 1.0), 6.667, 6.25)
    """
    _check(alpha=alpha, beta=beta, sigma=sigma)
    if not alpha < beta * sigma < 2 * alpha:
        raise ValueError(
            f"The lemma needs alpha < beta sigma < 2 alpha; got alpha={alpha}, "
            f"beta sigma={beta * sigma:.6g}. Choose sigma between {alpha / beta:.6g} and "
            f"{2 * alpha / beta:.6g}."
        )
    return Lemma(alpha, beta, sigma, ((beta * sigma - alpha) / alpha, 1.0))


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and above 0, got {value}.")
