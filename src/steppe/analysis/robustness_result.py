"""The result of `robustness`: its numbers, its table and its figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from steppe.analysis.changes import Change, words
from steppe.analysis.results import Result, plain

if TYPE_CHECKING:
    pass

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
        return self._means(0)

    @property
    def accuracy(self) -> Tensor:
        return self._means(1)

    @property
    def ece(self) -> Tensor:
        return self._means(2)

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
        values = self.values[METRICS.index(metric)]
        return torch.stack(
            [
                values[:, c, :n].std(1) if n > 1 else torch.full((len(values),), torch.nan).double()
                for c, n in enumerate(self.counts)
            ],
            1,
        )

    def noise_borne(
        self, drop: float = 0.01, confidence: float = 0.95, statistics: str | None = None
    ) -> float:
        """The largest ratio of weight noise that costs at most `drop` accuracy on average.

        For this ratio and every smaller one that was measured, the upper bound of the mean loss of
        accuracy, a one-sided t-bound over pairs of draws at this confidence, is at most `drop`. It
        is 0 if no ratio is borne, and a lower bound if the largest one is. `statistics` chooses among
        the result's own, by default the first.
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
        spread = {metric: self.spread(metric) for metric in METRICS}  # type: ignore[arg-type]
        return [
            {
                "change": label,
                "kind": self.kinds[c],
                "scheme": self.schemes[c],
                "size": self.sizes[c],
                "statistics": statistics,
                "draws": self.counts[c],
                **{m: float(self._means(i)[s, c]) for i, m in enumerate(METRICS)},
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
        metrics = ("accuracy", "loss", "ece") if classes else ("loss",)
        names = {"accuracy": "accuracy %", "loss": "loss", "ece": "ECE %"}
        several = len(self.statistics) > 1
        header = ["change"]
        for statistics in self.statistics:
            header += [names[m] + (f", {statistics}" if several else "") for m in metrics]
        lines = []
        for c, label in enumerate(self.labels):
            cells = [label]
            for s in range(len(self.statistics)):
                cells += [self._cell(metric, s, c) for metric in metrics]
            lines.append(tuple(cells))
        return Table(tuple(header), tuple(lines), notes=self.notes()).render(form)

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

    def _means(self, metric: int) -> Tensor:
        values = self.values[metric]
        return torch.stack([values[:, c, :n].mean(1) for c, n in enumerate(self.counts)], 1)

    def _cell(self, metric: str, s: int, c: int) -> str:
        i = METRICS.index(metric)
        scale = 1 if metric == "loss" else 100
        mean = scale * float(self._means(i)[s, c])
        form = ".4g" if metric == "loss" else ".1f"
        if metric == "accuracy" and self.counts[c] > 1:
            return f"{mean:{form}} ± {100 * float(self.spread()[s, c]):{form}}"
        return f"{mean:{form}}"
