"""Ensemble: predictions averaged over weight noise, beside those of the single model."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from steppe.analysis.calibration import calibration_error
from steppe.analysis.problem import Problem, check_problem
from steppe.analysis.progress import Progress, Show
from steppe.analysis.replica import Replica
from steppe.analysis.results import Result
from steppe.attaching import perturbed
from steppe.noise import check_seed
from steppe.schedules import check_nonnegative, check_number


@dataclass(frozen=True, eq=False, kw_only=True)
class Ensemble(Result):
    """(NLL, accuracy, calibration error) of the single model, of each draw, and of their averages.

    `members[i]` is the model under draw i, `averaged[i]` the mean of the probabilities under draws 0 to i.
    Accuracy and calibration error are fractions. `seconds`: of the single model and of all draws.
    """

    single: Tensor
    members: Tensor
    averaged: Tensor
    ratio: float
    seed: int
    seconds: tuple[float, float]

    def table(self, form: Literal["text", "markdown", "csv"] = "text") -> str:
        """The single model, the mean over single draws, and the ensemble, each with its cost."""
        from steppe.lab.tables import Table

        count, times = len(self.members), self.seconds[1] / self.seconds[0]
        rows = (
            ("single model", self.single, "1"),
            ("one draw, mean", self.members.mean(0), "1"),
            (f"average of {count} draws", self.averaged[-1], str(count)),
        )
        lines = [
            (name, f"{nll:.4f}", f"{100 * right:.2f}", f"{100 * ece:.2f}", forwards)
            for name, (nll, right, ece), forwards in rows
        ]
        note = (
            f"{self.origin['samples']} samples; Gaussian noise of ratio {self.ratio:g}. All draws together "
            f"took {times:.1f} times as long as the single model ({self.seconds[1]:.2f} s)."
        )
        header = ("prediction", "NLL", "accuracy %", "ECE %", "forwards")
        return Table(header, tuple(lines), notes=(note,)).render(form)

    __str__ = table


def ensemble(
    problem: Problem,
    ratio: float = 0.1,
    samples: int = 8,
    *,
    seed: int = 0,
    progress: Show = None,
) -> Ensemble:
    """Negative log-likelihood, accuracy and calibration of predictions averaged over weight noise.

    The weights under analysis are drawn `samples` times by `steppe.perturbed(…, ratio=ratio)`, one
    forward each. Outputs must be logits, `(n, classes, …)`, and targets classes; negative targets are
    ignored.

    Examples:
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> problem = Problem(model, torch.nn.functional.cross_entropy,
        ...                   (torch.eye(2), torch.arange(2)))
        >>> [round(value, 4) for value in ensemble(problem, ratio=0.0, samples=2).averaged[1].tolist()]
        [0.3133, 1.0, 0.2689]
    """
    check_problem(problem)
    check_nonnegative("ratio", ratio)
    check_number("samples", samples, whole=True)
    check_seed(seed)
    if problem.bn == "recalibrate":
        raise ValueError(
            'ensemble() does not take bn="recalibrate": an ensemble that is deployed has the stored '
            'statistics. Use bn="eval".'
        )
    settings: dict[str, Any] = {"ratio": float(ratio), "seed": seed, "origin": problem.describe()}
    bar = Progress("ensemble", samples + 1, progress)
    y, seconds, sums = problem.data[1], [0.0, 0.0], torch.tensor(-math.inf)
    with problem.replica() as replica:
        out = tuple(n for n, _ in replica.model.named_parameters() if n not in problem.names)

        def row(number: int) -> Tensor:
            nonlocal sums
            begin, draw = time.perf_counter(), (seed << 32) + number
            noise = perturbed(replica.model, seed=draw, ratio=ratio, exclude=out)
            with noise if number else nullcontext():
                logs = mean = _log_probabilities(replica)
            seconds[min(number, 1)] += time.perf_counter() - begin
            if number:
                sums = torch.logaddexp(sums, logs)
                mean = sums - math.log(number)
            return torch.stack([_metrics(logs, y), _metrics(mean, y)])

        rows = bar.rows(range(samples + 1), row, problem)
    return Ensemble(
        single=rows[0, 0],
        members=rows[1:, 0],
        averaged=rows[1:, 1],
        seconds=(seconds[0], seconds[1]),
        **settings,
    )


def _log_probabilities(replica: Replica) -> Tensor:
    """Of every sample, in float64: (n, classes, …)."""
    seen: list[Tensor] = []

    def look(output: Any, y: Tensor) -> None:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        fits = isinstance(output, Tensor) and output.ndim > 1 and output[:, 0].shape == y.shape
        if not fits or y.is_floating_point():
            raise ValueError(
                f"ensemble() averages probabilities of classes: outputs must be logits (n, classes, …) and "
                f"targets classes (n, …), got {shape} and {tuple(y.shape)} ({y.dtype})."
            )
        seen.append(output.double().log_softmax(1).cpu())

    replica.evaluate(look=look)
    return torch.cat(seen)


def _metrics(logs: Tensor, y: Tensor) -> Tensor:
    y = y.cpu().reshape(-1)
    logs = logs.movedim(1, -1).reshape(len(y), -1)[y >= 0]
    y = y[y >= 0]
    confidence, guess = logs.exp().max(1)
    right = (guess == y) & ~confidence.isnan()
    nll = -logs.gather(1, y[:, None]).mean()
    values = (float(nll), float(right.double().mean()), calibration_error(confidence, right))
    return torch.tensor(values, dtype=torch.float64)
