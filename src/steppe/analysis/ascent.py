"""Adversarial displacements: the loss at its worst within a radius, for one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steppe.analysis.directions import length, random_like
from steppe.analysis.replica import Replica

Displacement = list[Tensor]


def sam_direction(
    replica: Replica, rows: slice, scales: Sequence[Tensor] | None = None
) -> tuple[Displacement, float]:
    """SAM's ascent direction at the centre for these samples, and how steep the loss is along it.

    The direction `v` has `‖v / c‖ = 1` with scales `c` (1 by default): `v = c² g / ‖c g‖`, and the
    slope is `‖c g‖`. Where the gradient vanishes every direction is as good: a fixed random one.
    """
    replica.place(replica.centre)
    _, gradient = replica.gradient(rows)
    return _steepest(gradient, scales)


def ascend(
    replica: Replica,
    rows: slice,
    rho: float,
    steps: int,
    *,
    start: Displacement,
    scales: Sequence[Tensor] | None = None,
) -> tuple[float, Displacement]:
    """The largest loss that projected gradient ascent finds in `‖eps / c‖ <= rho`.

    From `rho * start`, a unit direction: `steps` steps of length rho along the normalised
    gradient, each projected back into the ball. The best point seen counts, so the answer is
    never below the loss at the start.
    """
    eps = [rho * v for v in start]
    best_loss, best = -float("inf"), eps
    for step in range(steps + 1):
        replica.offset(eps)
        if step == steps:
            loss = replica.evaluate(rows)[0]
        else:
            loss, gradient = replica.gradient(rows)
        if not loss <= best_loss:  # a NaN is the worst loss there is, and stays
            best_loss, best = loss, eps
        if loss != loss or step == steps:
            break
        uphill, _ = _steepest(gradient, scales)
        moved = [e.add(v, alpha=rho) for e, v in zip(eps, uphill, strict=True)]
        size = length(_divided(moved, scales))
        eps = [e * min(1.0, rho / size) for e in moved] if size > 0 else moved
    return best_loss, best


def _steepest(
    gradient: Sequence[Tensor], scales: Sequence[Tensor] | None
) -> tuple[Displacement, float]:
    scaled = _times(gradient, scales)
    slope = length(scaled)
    if slope == 0:
        scaled = _times(random_like(gradient, seed=0), scales)
        return [v / length(scaled) for v in _times(scaled, scales)], 0.0
    return [v / slope for v in _times(scaled, scales)], slope


def _times(tensors: Sequence[Tensor], scales: Sequence[Tensor] | None) -> list[Tensor]:
    if scales is None:
        return list(tensors)
    return [t * c for t, c in zip(tensors, scales, strict=True)]


def _divided(tensors: Sequence[Tensor], scales: Sequence[Tensor] | None) -> list[Tensor]:
    if scales is None:
        return list(tensors)
    # Where the scale is 0 nothing moves: 0 / 0 counts as 0.
    pairs = zip(tensors, scales, strict=True)
    return [torch.where(c > 0, t / c, torch.zeros_like(t)) for t, c in pairs]
