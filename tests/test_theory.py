import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe import theory

positive = st.floats(1e-3, 1e3)
part = st.floats(0.01, 0.99)


@given(alpha=positive, beta=positive, where=part, inside=part)
def test_the_lemma_holds_over_random_constants(alpha, beta, where, inside):
    sigma = (1 + where) * alpha / beta
    case = theory.lemma(alpha, beta, sigma)
    low, high = case.lam_range
    lam = low + inside * (high - low)
    assert case.bayes < beta
    assert case.mixed(lam) < case.bayes
    floors = theory.noise_floor(beta, sigma, 7), theory.noise_floor(beta, sigma / lam, 7, lam)
    assert floors[0] == pytest.approx(floors[1], rel=1e-12)
    assert low < case.best_lam < 1
    assert case.mixed(case.best_lam) <= case.mixed(lam) * (1 + 1e-12)


@given(alpha=positive, beta=positive, where=part, outside=st.floats(0.01, 0.99))
def test_outside_its_range_of_lam_mixing_is_not_smoother(alpha, beta, where, outside):
    case = theory.lemma(alpha, beta, (1 + where) * alpha / beta)
    lam = outside * case.lam_range[0]
    assert case.mixed(lam) >= case.bayes * (1 - 1e-12)


@given(alpha=positive, beta=positive, sigma=positive, lam=st.floats(0, 1))
def test_mixed_smoothness_lies_between_bayes_and_plain(alpha, beta, sigma, lam):
    mixed = theory.mixed_smoothness(alpha, beta, sigma, lam)
    bayes = theory.bayes_smoothness(alpha, beta, sigma)
    assert bayes <= mixed * (1 + 1e-12)
    assert mixed <= beta


@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("lam", [0.0, 0.3, 0.5, 1.0])
def test_smoothness_bounds_the_curvature_of_a_smoothed_corner(sigma, lam):
    """L = sqrt(w² + h²) has alpha = 1, beta = 1/h; L'' = h² (w² + h²)^(-3/2) is averaged exactly."""
    h = 0.2
    nodes = np.linspace(-8, 8, 4001)
    weights = np.exp(-(nodes**2) / 2)
    weights /= weights.sum()  # the trapezoid rule, exact to rounding for smooth functions
    w = np.linspace(-2, 2, 101)[:, None]

    def curvature(v):
        return h**2 * (v**2 + h**2) ** -1.5

    bayes = (curvature(w + sigma * nodes) * weights).sum(1)
    mixed = lam * bayes + (1 - lam) * curvature(w[:, 0])
    bound = theory.mixed_smoothness(1.0, 1 / h, sigma, lam)
    assert mixed.max() <= bound * (1 + 1e-9)


def simulate(loss_gradient, start, *, steps, gamma0, M, sigma, lam, same_batch=False, trials=400):
    """The mean over time and trials of ‖grad L(w_t)‖² for m-RWP with Gaussian batch noise."""
    rng = np.random.default_rng(0)
    d = len(start)
    w = np.tile(start, (trials, 1))
    squares = np.zeros(trials)
    for t in range(1, steps + 1):
        g = loss_gradient(w)
        squares += (g**2).sum(1)
        noise1 = rng.normal(size=w.shape) * math.sqrt(M / d)
        noise2 = noise1 if same_batch else rng.normal(size=w.shape) * math.sqrt(M / d)
        perturbed = loss_gradient(w + sigma * rng.normal(size=w.shape)) + noise1
        w = w - gamma0 / math.sqrt(t) * (lam * perturbed + (1 - lam) * (g + noise2))
    means = squares / steps
    return means.mean(), means.std(ddof=1) / math.sqrt(trials)


# Functions whose beta is known: value at the start minus the minimum, and the gradient.
FUNCTIONS = {
    "quadratic": (2.0, lambda w: 1.0 * (w**2).sum(-1), lambda w: 2 * w),
    "corner": (
        5.0,
        lambda w: (np.sqrt(w**2 + 0.04) - 0.2).sum(-1),
        lambda w: w / np.sqrt(w**2 + 0.04),
    ),
    "waves": (1.0, lambda w: (1 - np.cos(w)).sum(-1), np.sin),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("lam", "same_batch"), [(1.0, False), (0.5, False), (0.5, True), (0.2, False), (0.0, False)]
)
@pytest.mark.parametrize("sigma", [0.0, 0.3])
@pytest.mark.parametrize("steps", [1, 10, 200])
def test_the_gradient_bound_holds_along_trajectories(name, lam, same_batch, sigma, steps):
    beta, loss, gradient = FUNCTIONS[name]
    start, M, gamma0 = np.array([1.0, -2.0, 0.5, 3.0]), 1.0, 0.9 / beta
    mean, error = simulate(
        gradient,
        start,
        steps=steps,
        gamma0=gamma0,
        M=M,
        sigma=sigma,
        lam=lam,
        same_batch=same_batch,
    )
    bound = theory.gradient_bound(
        steps,
        gap=float(loss(start)),
        gamma0=gamma0,
        beta=beta,
        M=M,
        sigma=sigma,
        d=4,
        lam=lam,
        same_batch=same_batch,
        exact_sum=True,
    )
    assert mean <= bound + 3 * error
    assert mean > 0


def test_the_bound_is_the_printed_one():
    constants = {"gap": 2.0, "gamma0": 0.1, "beta": 3.0, "M": 5.0, "sigma": 0.2, "d": 7}
    rwp = theory.gradient_bound(50, **constants)
    root, noise = math.sqrt(50), 0.2**2 * 7
    printed = 2 * 2 / (0.1 * root) + (2 * 3 * 5 + 27 * noise) * 0.1 * math.log(50) / root
    assert rwp == pytest.approx(printed + 2 * 9 * noise, rel=1e-14)
    mixed = theory.gradient_bound(50, lam=0.5, **constants)
    printed = 2 * 2 / (0.1 * root) + (15 + 27 * noise / 4) * 0.1 * math.log(50) / root
    assert mixed == pytest.approx(printed + 2 * 9 * noise / 4, rel=1e-14)
    assert theory.gradient_bound(50, exact_sum=True, **constants) > rwp


BAD = {
    "lam": (lambda: theory.mixed_smoothness(1, 1, 1, 1.5), r"lam must be in \[0, 1\], got 1.5"),
    "sigma": (lambda: theory.bayes_smoothness(1, 1, -1), "sigma must be finite and at least 0"),
    "alpha": (lambda: theory.bayes_smoothness(0, 1, 1), "alpha must be finite and above 0"),
    "gamma0": (
        lambda: theory.gradient_bound(9, gap=1, gamma0=0.5, beta=2, M=1, sigma=0, d=1),
        "needs gamma0 < 1/beta; got gamma0=0.5 and 1/beta=0.5",
    ),
    "lemma": (
        lambda: theory.lemma(1.0, 10.0, 0.3),
        "Choose sigma between 0.1 and 0.2",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_what_the_theorems_do_not_cover_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
