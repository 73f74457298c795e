"""The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.analysis.hessian import Hessian
from steppe.analysis.lanczos import Krylov
from steppe.analysis.problem import Problem, check_problem
from steppe.analysis.progress import Progress, Show
from steppe.analysis.results import Result

# n times the weight of a simple eigenvalue is a squared normal: above this in one probe of a
# thousand. More weight than that means a multiple eigenvalue, such as a null space.
SIMPLE = 10.83


@dataclass(frozen=True, eq=False, kw_only=True)
class Spectrum(Result):
    """A spectral density on a grid, and the quadrature behind it.

    `density` integrates to one over `grid`. The mean over eigenvalues of `f` is
    `sum(weights * f(nodes))`. `trace_error` is the trace's standard error from the number of probes.
    """

    grid: Tensor
    density: Tensor
    nodes: Tensor
    weights: Tensor
    trace: float
    trace_error: float
    largest: float
    largest_residual: float
    smallest: float
    smallest_residual: float
    width: float
    steps: int
    probes: int
    seed: int


def spectrum(
    problem: Problem,
    steps: int = 50,
    probes: int = 2,
    *,
    seed: int = 0,
    points: int = 1024,
    width: float = 0.01,
    progress: Show = None,
) -> Spectrum:
    """The eigenvalue density of the Hessian from `steps * probes` products.

    Lanczos from a random unit vector gives a Gauss quadrature of the density, exact with as many
    steps as weights. A Ritz value that has converged and stands apart is one eigenvalue, of weight
    exactly 1/n; the other weights are rescaled. `width` of the smoothing kernel is relative to the
    range of the nodes, and at least two grid steps.

    Examples:
        >>> model = torch.nn.Linear(3, 1, bias=False).double()
        >>> data = torch.diag(torch.tensor([3.0, 2.0, 1.0])).double(), torch.zeros(3, 1).double()
        >>> problem = Problem(model, lambda out, y: (out - y).square().sum(1).mean() * 1.5, data)
        >>> result = spectrum(problem, steps=3, probes=1)
        >>> round(result.trace, 6), round(result.largest, 6)
        (14.0, 9.0)
    """
    check_problem(problem)
    for name, value in {"steps": steps, "probes": probes}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if points < 8 or not width > 0:
        raise ValueError(f"points must be at least 8 and width above 0, got {points}, {width}.")
    origin = problem.describe()
    depth = min(steps, problem.size)
    bar = Progress("spectrum", depth * probes, progress)
    with problem.replica() as replica:
        rules = _rules(Hessian(replica), depth, probes, seed, bar)
    nodes = torch.cat([rule.nodes for rule in rules])
    weights = torch.cat([rule.weights for rule in rules]) / probes
    grid, density, kernel = smooth(nodes, weights, points, width)
    top = max(rules, key=lambda rule: rule.nodes[-1].item())
    low = min(rules, key=lambda rule: rule.nodes[0].item())
    n = problem.size
    spread = sum((rule.weights * rule.nodes.square() * ~rule.known).sum().item() for rule in rules)
    return Spectrum(
        origin=origin,
        grid=grid,
        density=density,
        nodes=nodes,
        weights=weights,
        trace=n * (weights * nodes).sum().item(),
        trace_error=math.sqrt(2 * n * spread) / probes,
        largest=top.nodes[-1].item(),
        largest_residual=top.bounds[-1].item(),
        smallest=low.nodes[0].item(),
        smallest_residual=low.bounds[0].item(),
        width=kernel,
        steps=steps,
        probes=probes,
        seed=seed,
    )


@dataclass
class _Rule:
    """The quadrature of one probe; `known` marks the nodes that are single eigenvalues."""

    nodes: Tensor
    weights: Tensor
    bounds: Tensor
    known: Tensor


def _rules(hessian: Hessian, depth: int, probes: int, seed: int, bar: Progress) -> list[_Rule]:
    found = []
    bar.start(hessian.replica.problem, "products")
    for probe in range(probes):
        krylov = Krylov(hessian.size, hessian.eps, seed + 7919 * probe)
        # At a breakdown the quadrature is exact: a restart would add what has no weight.
        while len(krylov) < depth and not krylov.broken:
            krylov.step(hessian)
            bar.step()
        values, vectors, bounds = krylov.ritz()
        found.append(_corrected(values, vectors[0].square(), bounds, hessian.size))
    bar.close()
    return found


def _corrected(nodes: Tensor, raw: Tensor, bounds: Tensor, n: int) -> _Rule:
    """Give each node that is one eigenvalue the weight 1/n, and the others what is left.

    A handful of large eigenvalues carry most of the trace, and their raw weights are squared normals.
    """
    infinite = torch.full((1,), math.inf, dtype=torch.float64)
    gaps = torch.cat([infinite, nodes.diff(), infinite])
    apart = bounds <= 0.01 * torch.minimum(gaps[:-1], gaps[1:])
    known = apart & (n * raw <= SIMPLE)
    left = 1 - known.sum().item() / n
    rest = raw[~known].sum().item()
    if known.sum() < n and (left <= 0 or rest <= 0):
        # Nothing is left to take up the difference: multiple eigenvalues passed for simple ones.
        known, left, rest = torch.zeros_like(known), 1.0, raw.sum().item()
    weights = torch.where(known, 1 / n, raw * (left / rest if rest else 0.0))
    return _Rule(nodes, weights, bounds, known)


def smooth(
    nodes: Tensor, weights: Tensor, points: int = 1024, width: float = 0.01
) -> tuple[Tensor, Tensor, float]:
    """Grid, density and kernel width of a Gaussian smoothing of weighted nodes."""
    low, high = nodes.min().item(), nodes.max().item()
    span = (high - low) or abs(high) or 1.0
    # Six widths of margin on each side hold all of the kernel's mass to 1e-8.
    kernel = max(width * span, 2 * span / (points - 25)) if points > 32 else span
    grid = torch.linspace(low - 6 * kernel, high + 6 * kernel, points, dtype=torch.float64)
    z = (grid[:, None] - nodes[None, :]) / kernel
    bumps = torch.exp(-0.5 * z.square()) / (kernel * math.sqrt(2 * math.pi))
    return grid, bumps @ weights, kernel
