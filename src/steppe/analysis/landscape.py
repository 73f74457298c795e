"""Loss surfaces over a plane of weights, and loss along a line."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steppe.analysis.directions import filter_normalised, length
from steppe.analysis.problem import Problem, check_problem, digest
from steppe.analysis.progress import Checkpoint, Progress, Show
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Line(Result):
    """Loss and accuracy along a line: `loss[i]` is at `(1 - t[i]) w0 + t[i] w1`."""

    t: Tensor
    loss: Tensor
    accuracy: Tensor | None = None

    @property
    def holes(self) -> int:
        return int((~self.loss.isfinite()).sum())

    @property
    def barrier(self) -> float:
        """The most by which the loss exceeds the straight line between its ends."""
        inside = (self.t >= 0) & (self.t <= 1)
        t, loss = self.t[inside], self.loss[inside]
        return float((loss - (1 - t) * loss[0] - t * loss[-1]).max())


def landscape(
    problem: Problem,
    n: int = 51,
    span: float = 1.0,
    seeds: tuple[int, int] = (0, 1),
    *,
    directions: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Show = None,
) -> Landscape:
    """The loss on `n x n` points of `[-span, span]²` along two directions.

    The directions are random and filter-normalised, one for each seed, or the given ones (a
    tensor for each parameter under analysis). Each point is built from `w0` anew. `n=50` is the
    paper's grid; an odd `n` has the trained weights at its centre.

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
        chosen = directions or [filter_normalised(replica.centre, seed) for seed in seeds]
        d1, d2 = (_checked(direction, replica) for direction in chosen)
        settings = {"analysis": "landscape", "n": n, "span": span, **origin}
        settings["directions"] = digest([*d1, *d2]) if directions else list(seeds)
        store = Checkpoint(checkpoint, settings)

        def weights(index: int) -> list[Tensor]:
            a, b = axis[index // n].item(), axis[index % n].item()
            moved = zip(replica.centre, d1, d2, strict=True)
            return [w.add(u, alpha=a).add_(v, alpha=b) for w, u, v in moved]

        centre = replica.evaluate()[0]
        loss, accuracy = _scan(replica, weights, n * n, store, bar)
    return Landscape(
        origin=origin,
        a=axis,
        b=axis.clone(),
        loss=loss.reshape(n, n),
        accuracy=None if accuracy is None else accuracy.reshape(n, n),
        centre=centre,
        seeds=None if directions else (seeds[0], seeds[1]),
    )


def interpolate(
    problem: Problem,
    other: Problem | nn.Module | Mapping[str, Tensor],
    n: int = 51,
    *,
    start: float = 0.0,
    end: float = 1.0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Show = None,
) -> Line:
    """The loss along the straight line from the problem's weights to another model's.

    `t` runs from `start` to `end` in `n` points, 0 being this model and 1 the other. With
    `bn="eval"` the stored statistics are interpolated as the weights are; between two nets they
    fit neither, and `bn="recalibrate"` says more.
    """
    check_problem(problem)
    if n < 2 or not end > start:
        raise ValueError(f"n must be at least 2 and end above start, got {n}, {start}, {end}.")
    model = other.model if isinstance(other, Problem) else other
    target = model.state_dict() if isinstance(model, nn.Module) else model
    origin = problem.describe()
    t = torch.linspace(start, end, n, dtype=torch.float64)
    bar = Progress("interpolate", n, progress)
    with problem.replica() as replica:
        named = zip(problem.names, replica.centre, strict=True)
        ends = [_entry(target, name, w) for name, w in named]
        buffers = [] if problem.params else _statistics(replica, target)
        settings = {"analysis": "interpolate", "n": n, "start": start, "end": end, **origin}
        settings["other"] = digest([*ends, *(there for _, _, there in buffers)])
        store = Checkpoint(checkpoint, settings)

        def weights(index: int) -> list[Tensor]:
            step = t[index].item()
            for buffer, here, there in buffers:
                buffer.copy_(torch.lerp(here, there, step))
            return [torch.lerp(w, e, step) for w, e in zip(replica.centre, ends, strict=True)]

        loss, accuracy = _scan(replica, weights, n, store, bar)
    return Line(origin=origin, t=t, loss=loss, accuracy=accuracy)


def _scan(
    replica: Replica,
    weights: Callable[[int], list[Tensor]],
    total: int,
    store: Checkpoint,
    bar: Progress,
) -> tuple[Tensor, Tensor | None]:
    """Loss and accuracy at each of `total` points, resuming from a checkpoint if there is one."""

    def row(index: int) -> Tensor:
        replica.place(weights(index))
        loss, right = replica.evaluate()
        return torch.tensor([loss, math.nan if right is None else right], dtype=torch.float64)

    loss, accuracy = store.rows(total, row, replica.problem, bar).unbind(1)
    return loss, None if accuracy.isnan().all() else accuracy


def _checked(direction: Sequence[Tensor], replica: Replica) -> list[Tensor]:
    shapes = [tuple(d.shape) for d in direction]
    wanted = [tuple(w.shape) for w in replica.centre]
    if shapes != wanted:
        raise ValueError(
            f"A direction must have one tensor for each parameter under analysis, of shapes "
            f"{wanted}; got {shapes}."
        )
    if length(direction) == 0:
        raise ValueError(
            "A direction is zero: the plane would be a point. Filter-normalised directions leave "
            "out vectors (biases, norm weights) and filters that are zero; choose params= with "
            "at least one weight matrix, or give directions=."
        )
    return [d.to(w) for d, w in zip(direction, replica.centre, strict=True)]


def _entry(state: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    if name not in state or state[name].shape != like.shape:
        got = tuple(state[name].shape) if name in state else "nothing"
        raise ValueError(
            f"The other model does not match: {name} should have shape {tuple(like.shape)}, "
            f"got {got}. Interpolation needs two models of one architecture."
        )
    return state[name].detach().to(like)


def _statistics(replica: Replica, state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Buffers that lie on the line too, with their values at both ends."""
    named = [(n, b) for n, b in replica.model.named_buffers() if b.is_floating_point()]
    return [(b, b.clone(), _entry(state, name, b)) for name, b in named if name in state]
