"""Sharpness: how much the loss rises within a radius, on average or at worst."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from steppe.analysis.directions import ascend, random_like, sam_direction, scaled, weighted_mean
from steppe.analysis.problem import Problem, check_problem
from steppe.analysis.progress import Progress, Show
from steppe.analysis.results import Result

Kind = Literal["average", "worst"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sharpness(Result):
    """`value` is the mean rise of the loss over the parts of m samples, `error` its standard error.

    `rises` are the parts' own. For the average case the error comes from the random directions,
    for the worst case from the parts (NaN where there is only one).
    """

    value: float
    error: float
    rises: Tensor
    rho: float
    case: str
    m: int
    adaptive: bool
    draws: int
    steps: int
    seed: int


def sharpness(
    problem: Problem,
    rho: float = 0.05,
    case: Kind = "worst",
    m: int = 128,
    *,
    adaptive: bool = False,
    draws: int = 16,
    steps: int = 10,
    seed: int = 0,
    progress: Show = None,
) -> Sharpness:
    """m-sharpness: the rise `L_S(w + eps) - L_S(w)` over parts S of m samples, averaged over S.

    - `case="worst"`: the largest rise in `‖eps / c‖ <= rho`, found by `steps` steps of ascent from
      SAM's point (`steps=0`: SAM's one step).
    - `case="average"`: the mean rise for Gaussian eps with `E ‖eps / c‖² = rho²`, that is
      `std = rho c / sqrt(d)` an entry, over `draws` of them taken both ways. For a std of sigma
      itself ask for `rho = sigma sqrt(d)`.

    c is 1, or `|w|` if `adaptive` (ASAM's scaling, which does not change when layers are rescaled).
    To second order at a minimum, average is `rho² tr(H)/2d` and worst `rho² lambda_max/2`.

    Examples:
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = model.weight.data.zero_()
        >>> data = torch.diag(torch.tensor([2.0, 1.0])).double(), torch.zeros(2, 1).double()
        >>> problem = Problem(model, lambda out, y: (out - y).square().mean(), data)
        >>> round(sharpness(problem, rho=0.1, steps=50).value, 6)   # lambda_max is 4
        0.02
    """
    check_problem(problem)
    if not (math.isfinite(rho) and rho >= 0):
        raise ValueError(f"rho must be finite and at least 0, got {rho}.")
    if case not in ("average", "worst"):
        raise ValueError(f'case must be "average" or "worst", got {case!r}.')
    if m < 1 or draws < 1 or steps < 0:
        raise ValueError(
            f"m and draws must be at least 1 and steps at least 0, got {m}, {draws}, {steps}."
        )
    parts = -(-problem.samples // m)
    edges = [round(i * problem.samples / parts) for i in range(parts + 1)]
    rows = [slice(a, b) for a, b in pairwise(edges)]
    sizes = [part.stop - part.start for part in rows]
    settings: dict[str, Any] = {"rho": rho, "case": case, "m": m, "adaptive": adaptive}
    settings |= {"draws": draws, "steps": steps, "seed": seed, "origin": problem.describe()}
    bar = Progress("sharpness", 2 * draws if case == "average" else 3 * steps + 4, progress)
    with problem.replica() as replica:
        scales = [w.abs() for w in replica.centre] if adaptive else None

        def losses() -> Tensor:
            return torch.tensor([replica.evaluate(part)[0] for part in rows], dtype=torch.float64)

        def worst(part: slice) -> Tensor:
            start, _ = sam_direction(replica, part, scales)
            loss = ascend(replica, part, rho, steps, start=start, scales=scales)
            return torch.tensor(loss, dtype=torch.float64)

        def both_ways(draw: int) -> Tensor:
            # All parts see the same draws: an expectation needs no direction of its own for each.
            eps = scaled(random_like(replica.centre, seed + draw), scales)
            found = []
            for sign in (1.0, -1.0):
                replica.offset(eps, sign * rho / math.sqrt(problem.size))
                found.append(losses())
            return torch.stack(found).mean(0)

        base = losses()
        if case == "worst":
            rises = bar.rows(rows, worst, problem) - base
            value, error = weighted_mean(rises, sizes)
        else:
            every = bar.rows(range(draws), both_ways, problem) - base
            rises = every.mean(0)
            value, error = weighted_mean(weighted_mean(every.T, sizes)[0], [1.0] * draws)
    return Sharpness(value=value.item(), error=error.item(), rises=rises, **settings)
