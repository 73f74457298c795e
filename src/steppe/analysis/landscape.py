"""Loss surfaces over a plane of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from steppe.analysis.directions import filter_normalised, length
from steppe.analysis.problem import Problem, check_problem
from steppe.analysis.progress import Progress, Show
from steppe.analysis.replica import Replica
from steppe.analysis.results import Result


@dataclass(frozen=True, eq=False, kw_only=True)
class Landscape(Result):
    """Loss and accuracy on a grid: `loss[i, j]` is at `w0 + a[i] d1 + b[j] d2`.

    A loss that is not finite is kept as it came; `holes` counts those. `accuracy` is None where
    the targets are not classes. `centre` is the loss at `w0`.
    """

    a: Tensor
    b: Tensor
    loss: Tensor
    accuracy: Tensor | None = None
    centre: float
    seeds: tuple[int, int] | None

    @property
    def holes(self) -> int:
        return int((~self.loss.isfinite()).sum())


def landscape(
    problem: Problem,
    n: int = 51,
    span: float = 1.0,
    seeds: tuple[int, int] = (0, 1),
    *,
    progress: Show = None,
) -> Landscape:
    """The loss on `n x n` points of `[-span, span]²` along two directions.

    The directions are random and filter-normalised, one for each seed. Each point is built from
    `w0` anew. `n=50` is the paper's grid; an odd `n` has the trained weights at its centre.

    Examples:
        >>> model = torch.nn.Linear(2, 2, bias=False).double()
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> data = torch.eye(2).double(), torch.eye(2).double()
        >>> problem = Problem(model, lambda out, y: (out - y).square().sum(1).mean(), data)
        >>> landscape(problem, n=3).loss[1, 1].item()
        0.0
    """
    check_problem(problem)
    if n < 2 or not (span > 0 and math.isfinite(span)):
        raise ValueError(f"n must be at least 2 and span above 0, got n={n}, span={span}.")
    origin = problem.describe()
    # Whole numbers first: the middle of an odd grid is exactly 0, and both halves mirror.
    axis = span * torch.arange(1 - n, n, 2, dtype=torch.float64) / (n - 1)
    bar = Progress("landscape", n * n, progress)
    with problem.replica() as replica:
        d1, d2 = (_direction(replica, seed) for seed in seeds)

        def point(place: tuple[float, float]) -> Tensor:
            a, b = place
            moved = zip(replica.centre, d1, d2, strict=True)
            replica.place([w.add(u, alpha=a).add_(v, alpha=b) for w, u, v in moved])
            loss, right = replica.evaluate()
            return torch.tensor([loss, math.nan if right is None else right], dtype=torch.float64)

        centre = replica.evaluate()[0]
        places = list(product(axis.tolist(), axis.tolist()))
        loss, accuracy = bar.rows(places, point, problem).reshape(n, n, 2).unbind(2)
    return Landscape(
        origin=origin,
        a=axis,
        b=axis.clone(),
        loss=loss,
        accuracy=None if accuracy.isnan().all() else accuracy,
        centre=centre,
        seeds=(seeds[0], seeds[1]),
    )


def _direction(replica: Replica, seed: int) -> list[Tensor]:
    found = filter_normalised(replica.centre, seed)
    if length(found) == 0:
        raise ValueError(
            "A direction is zero: the plane would be a point. Filter-normalised directions leave "
            "out vectors (biases, norm weights) and filters that are zero; choose params= with "
            "at least one weight matrix."
        )
    return found
