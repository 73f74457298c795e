"""The result of `robustness`: its numbers, its table and its figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from steppe.analysis.changes import Change, words
from steppe.analysis.results import Result, plain

METRICS = ("loss", "accuracy", "ece")
MOVED = 0.005
"""Recalibrating alone should move the accuracy of the unchanged model by less than this."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Robustness(Result):
    """Loss, accuracy and calibration error: `accuracy[s, c]` with `statistics[s]` after change c.

    Change 0 is none. Change c is of `kinds[c]`, `schemes[c]` and `sizes[c]`. `statistics` says whose
    BatchNorm statistics were used: `"as is"` the stored ones, `"recalibrated"` those of training
    batches after the change, `"batch"` those of each micro-batch. Accuracy and calibration error
    are fractions, NaN where the targets are not classes.

    `values[m, s, c, d]` holds every draw d of `METRICS[m]`; draws 2i and 2i + 1 have opposite signs.
    """

    values: Tensor
    kinds: tuple[str, ...]
    schemes: tuple[str, ...]
    sizes: tuple[float, ...]
    counts: tuple[int, ...]
    statistics: tuple[str, ...]
    recalibration_samples: int
    norms: int
    """Layers with stored statistics."""
    changed: tuple[str, ...]
    include: str
    draws: int
    seed: int

    @property
    def loss(self) -> Tensor:
        return self._over_draws("loss", _mean)

    @property
    def accuracy(self) -> Tensor:
        return self._over_draws("accuracy", _mean)

    @property
    def ece(self) -> Tensor:
        return self._over_draws("ece", _mean)

    @property
    def labels(self) -> tuple[str, ...]:
        """Each change in words."""
        return tuple(map(words, self.kinds, self.sizes, self.schemes))

    def place(self, change: Change) -> int | None:
        """The number of a change in this result; None if it was not measured."""
        wanted = (change.kind, change.scheme, change.size)
        found = list(zip(self.kinds, self.schemes, self.sizes, strict=True))
        return found.index(wanted) if wanted in found else None

    def spread(self, metric: Literal["loss", "accuracy", "ece"] = "accuracy") -> Tensor:
        """The standard deviation over single draws; NaN where there is only one."""
        return self._over_draws(metric, _std)

    def noise_borne(
        self, drop: float = 0.01, confidence: float = 0.95, statistics: str | None = None
    ) -> float:
        """The largest ratio of weight noise that costs at most `drop` accuracy on average.

        For it and every smaller ratio measured, a one-sided t-bound of the mean loss of accuracy, over
        pairs of draws, is at most `drop`: 0 if no ratio is borne, a lower bound if the largest is.
        `statistics` chooses among the result's own, by default the first.
        """
        from scipy import stats

        if self.draws < 2:
            raise ValueError(f"A confidence needs at least 2 draws, got {self.draws}.")
        statistics = statistics or self.statistics[0]
        if statistics not in self.statistics:
            raise ValueError(f"statistics must be one of {self.statistics}, got {statistics!r}.")
        here = self.statistics.index(statistics)
        if self.accuracy[here].isnan().all():
            raise ValueError("noise_borne() needs an accuracy: the targets are not classes.")
        borne = 0.0
        noises = [c for c, kind in enumerate(self.kinds) if kind == "weight noise"]
        for c in sorted(noises, key=lambda c: self.sizes[c]):
            lost = self.accuracy[here, 0] - self.values[1, here, c, : self.counts[c]]
            pairs = lost.view(-1, 2).mean(1)
            wide = float(stats.t.ppf(confidence, len(pairs) - 1)) / math.sqrt(len(pairs))
            if not float(pairs.mean() + wide * pairs.std()) <= drop:
                break
            borne = self.sizes[c]
        return borne

    @property
    def recalibration_shift(self) -> float:
        """By how much recalibrating alone moves the accuracy of the unchanged model."""
        if "recalibrated" not in self.statistics:
            return math.nan
        return float(self.accuracy[1, 0] - self.accuracy[0, 0])

    def rows(self) -> list[dict[str, Any]]:
        """One record for each change and each way of BatchNorm's statistics."""
        mean = {metric: self._over_draws(metric, _mean) for metric in METRICS}
        spread = {metric: self._over_draws(metric, _std) for metric in METRICS}
        return [
            {
                "change": label,
                "kind": self.kinds[c],
                "scheme": self.schemes[c],
                "size": self.sizes[c],
                "statistics": statistics,
                "draws": self.counts[c],
                **{m: float(mean[m][s, c]) for m in METRICS},
                **{f"{m}_std": float(spread[m][s, c]) for m in METRICS},
            }
            for c, label in enumerate(self.labels)
            for s, statistics in enumerate(self.statistics)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists and numbers for JSON, with `rows()` for reading."""
        return {**super().to_dict(), "rows": plain(self.rows())}

    def table(self, form: Literal["text", "markdown", "csv"] = "text") -> str:
        """One line a change; accuracy in per cent, with the standard deviation over draws."""
        from steppe.lab.tables import Table

        classes = not bool(self.accuracy[0].isnan().all())
        names = {"accuracy": "accuracy %", "loss": "loss", "ece": "ECE %"}
        metrics = tuple(names) if classes else ("loss",)
        several = len(self.statistics) > 1
        header = ["change"]
        columns = [list(self.labels)]
        for s, statistics in enumerate(self.statistics):
            for metric in metrics:
                header.append(names[metric] + (f", {statistics}" if several else ""))
                columns.append(self._cells(metric, s))
        lines = tuple(zip(*columns, strict=True))
        return Table(tuple(header), lines, notes=self.notes()).render(form)

    def notes(self) -> tuple[str, ...]:
        """What a reader of the table must know."""
        o = self.origin
        said = [
            f"{o['samples']} samples, {o['parameters']} weights; changed: {len(self.changed)} tensors"
            + (" (two or more dimensions, no embeddings)." if self.include == "matrices" else ".")
        ]
        if "rounding" in self.kinds:
            said.append(
                "Rounding: symmetric, to nearest, 2^bits - 1 levels (2 bits: -1, 0, 1), one scale as named."
            )
        if self.draws > 1 and max(self.counts) > 1:
            said.append(
                f"Noise: mean ± standard deviation over {self.draws} draws taken with both signs."
            )
        if "recalibrated" in self.statistics:
            said.append(self._recalibration_words())
        elif self.norms and self.statistics == ("as is",):
            said.append(
                "BatchNorm statistics as stored; training batches (recalibrate=) show them recalibrated."
            )
        return tuple(said)

    def _recalibration_words(self) -> str:
        shift = self.recalibration_shift
        said = f"Recalibrated from {self.recalibration_samples} training samples after the change."
        if math.isnan(shift):
            return said
        said += f" Recalibrating alone moves the unchanged model by {100 * shift:+.2f} points"
        if abs(shift) <= MOVED:
            return f"{said}."
        return (
            f"{said}: compare recalibrated numbers with the recalibrated unchanged model, and check "
            "that the batches come from the training pipeline with its augmentation."
        )

    def _over_draws(self, metric: str, number: Callable[[Tensor], Tensor]) -> Tensor:
        values = self.values[METRICS.index(metric)]
        return torch.stack([number(values[:, c, :n]) for c, n in enumerate(self.counts)], 1)

    def _cells(self, metric: str, s: int) -> list[str]:
        scale, form = (1, ".4g") if metric == "loss" else (100, ".1f")
        means, stds = (scale * self._over_draws(metric, f)[s] for f in (_mean, _std))
        return [
            f"{mean:{form}}" + (f" ± {std:{form}}" if metric == "accuracy" and n > 1 else "")
            for mean, std, n in zip(means.tolist(), stds.tolist(), self.counts, strict=True)
        ]


def _mean(draws: Tensor) -> Tensor:
    return draws.mean(1)


def _std(draws: Tensor) -> Tensor:
    return draws.std(1) if draws.shape[1] > 1 else torch.full_like(draws[:, 0], torch.nan)
