"""Expected loss against the radius of a perturbation, random and adversarial (Figure 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steppe.analysis.directions import ascend, orthonormal, sam_direction, weighted_mean
from steppe.analysis.hessian import Hessian
from steppe.analysis.problem import Problem, check_problem
from steppe.analysis.progress import Progress, Show
from steppe.analysis.results import Result

KINDS = ("random", "sam", "pgd")


@dataclass(frozen=True, eq=False, kw_only=True)
class RadiusCurve(Result):
    """Mean loss at each radius for each kind: `loss[k, r]` for `kinds[k]` at `radii[r]`.

    `error` is the standard error over antithetic pairs of directions, or over batches (NaN where
    there is only one). `theory` is the second-order expansion along the same directions (NaN for
    pgd), `base` the loss without perturbation.
    """

    radii: Tensor
    loss: Tensor
    error: Tensor
    theory: Tensor
    base: float
    kinds: tuple[str, ...]
    batch: int
    directions: int
    steps: int
    seed: int

    def radii_at(self, rise: float) -> Tensor:
        """For each kind, the radius at which the mean loss lies `rise` above `base`: equal effect.

        Between the radii measured along a power law; infinite where none of them reaches it.
        """
        if not rise > 0:
            raise ValueError(f"rise must be above 0, got {rise}.")
        radii, rises = self.radii.tolist(), (self.loss - self.base).tolist()
        found = [radius_at(radii, row, rise) for row in rises]
        return torch.tensor(found, dtype=torch.float64)


def radius_at(radii: Sequence[float], rises: Sequence[float], rise: float) -> float:
    """Where the loss has first risen so far, between radii along a power law; else infinity.

    >>> round(radius_at([0.1, 1.0, 10.0], [0.01, 1.0, 100.0], 0.25), 3)
    0.5
    """
    before: tuple[float, float] | None = None
    for radius, found in zip(radii, rises, strict=True):
        if not found < rise:
            if before is None or math.isnan(found):
                return radius
            part = (rise - before[1]) / (found - before[1])
            if before[1] > 0:
                part = math.log(rise / before[1]) / math.log(found / before[1])
            return float(before[0] * (radius / before[0]) ** part)
        before = (radius, found)
    return math.inf


def perturbation_curve(
    problem: Problem,
    radii: Sequence[float],
    kinds: Sequence[str] = KINDS,
    batch: int = 256,
    *,
    directions: int | None = None,
    steps: int = 10,
    seed: int = 0,
    progress: Show = None,
) -> RadiusCurve:
    """The loss at `w + eps` with `‖eps‖ = r`, averaged, for each radius r.

    - `"random"`: over fixed random orthonormal directions u (16 by default), each taken both ways.
    - `"sam"`: along the gradient of each batch, measured on that batch.
    - `"pgd"`: the largest loss that `steps` steps of ascent find on each batch, from SAM's point.

    The smaller the batch, the farther the adversarial curves lie above the random one. Second
    order says `L + r²/2 mean(u'Hu)`, in expectation `L + r² tr(H)/2d`, and `L + r ‖g‖ + r²/2 v'Hv`
    with `v = g/‖g‖` for SAM.

    Examples:
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = model.weight.data.zero_()
        >>> data = torch.eye(2).double(), torch.zeros(2, 1).double()
        >>> problem = Problem(model, lambda out, y: (out - y).square().mean(), data)
        >>> perturbation_curve(problem, [1.0, 2.0], kinds=["random"]).loss
        tensor([[0.5000, 2.0000]], dtype=torch.float64)
    """
    check_problem(problem)
    lengths = torch.as_tensor(radii, dtype=torch.float64).tolist()
    count = min(16, problem.size) if directions is None else directions
    if not lengths or not all(math.isfinite(r) and r >= 0 for r in lengths):
        raise ValueError(
            f"radii must be finite numbers of at least 0, at least one; got {lengths}."
        )
    if isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS):
        raise ValueError(f"kinds must be some of {KINDS}, got {kinds!r}.")
    if batch < 1 or steps < 1:
        raise ValueError(f"batch and steps must be at least 1, got {batch} and {steps}.")
    if not 1 <= count <= problem.size:
        raise ValueError(
            f"directions must be between 1 and the number of weights, {problem.size} "
            f"(they are orthogonal); got {count}."
        )
    settings: dict[str, Any] = {"kinds": tuple(kinds), "batch": batch, "directions": count}
    settings |= {"steps": steps, "seed": seed, "origin": problem.describe()}
    blocks = [slice(i, i + batch) for i in range(0, problem.samples, batch)]
    # Forwards over all samples for one radius; a gradient counts as three.
    cost = {"random": 2 * count, "sam": 1, "pgd": 3 * steps + 1}
    bar = Progress("radius", len(lengths) * sum(cost[kind] for kind in kinds), progress)
    with problem.replica() as replica:
        base = replica.evaluate()[0]
        hessian = Hessian(replica)
        ends: dict[str, list[Any]] = dict.fromkeys(kinds, blocks)
        if "random" in ends:
            ends["random"] = orthonormal(replica.centre, count, seed)
        parts = [(kind, end) for kind in kinds for end in ends[kind]]

        def row(part: tuple[str, Any]) -> Tensor:
            kind, end = part
            if kind == "random":
                found = _random(hessian, end, lengths, base)
            else:
                found = _adversarial(hessian, end, lengths, steps if kind == "pgd" else 0)
            return torch.tensor(found, dtype=torch.float64)

        rows = bar.rows(parts, row, problem)
    sizes = {kind: [float(len(problem.data[0][block])) for block in blocks] for kind in kinds}
    sizes |= {"random": [1.0] * count}
    of = {kind: rows[[i for i, part in enumerate(parts) if part[0] == kind]] for kind in kinds}
    means = [weighted_mean(of[kind], sizes[kind]) for kind in kinds]
    return RadiusCurve(
        radii=torch.tensor(lengths, dtype=torch.float64),
        loss=torch.stack([mean[0] for mean, _ in means]),
        error=torch.stack([error[0] for _, error in means]),
        theory=torch.stack([mean[1] for mean, _ in means]),
        base=base,
        **settings,
    )


def _random(
    hessian: Hessian, u: list[Tensor], radii: list[float], base: float
) -> tuple[list[float], list[float]]:
    """Loss and second-order theory along one direction, both ways: odd terms cancel."""
    replica = hessian.replica
    replica.place(replica.centre)
    curvature = hessian.curvature(u)
    loss = []
    for r in radii:
        both = []
        for sign in (1.0, -1.0):
            replica.offset(u, sign * r)
            both.append(replica.evaluate()[0])
        loss.append(sum(both) / 2)
    return loss, [base + 0.5 * r * r * curvature for r in radii]


def _adversarial(
    hessian: Hessian, rows: slice, radii: list[float], steps: int
) -> tuple[list[float], list[float]]:
    """The same along (or from, in steps) the gradient of one batch, measured on it."""
    replica = hessian.replica
    v, slope = sam_direction(replica, rows)
    theory = [math.nan] * len(radii)
    if not steps:
        base, curvature = replica.evaluate(rows)[0], hessian.curvature(v, rows)
        theory = [base + r * slope + 0.5 * r * r * curvature for r in radii]
    return [ascend(replica, rows, r, steps, start=v) for r in radii], theory
