"""The result of `robustness`: its numbers, its table and its figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from steppe.analysis.changes import Change, words
from steppe.analysis.results import Result, plain
from steppe.schedules import check_number, check_share

METRICS = ("loss", "accuracy", "ece")
MOVED = 0.005
"""Recalibrating alone should move the accuracy of the unchanged model by less than this."""
BORNE = (
    "Largest ratio of weight noise at which the mean accuracy falls by at most one point, with 95 % "
    "confidence over draws"
)


def moved_words(shifts: Mapping[str, float]) -> str:
    """A warning where recalibrating alone moves unchanged models, by name, too far; else empty."""
    far = [f"{name} {100 * by:+.2f}".strip() for name, by in shifts.items() if abs(by) > MOVED]
    said = (
        f"Recalibrating alone moves the unchanged model by {', '.join(far)} points. Compare recalibrated "
        "numbers with the recalibrated unchanged model, and check that the batches come from the training "
        "pipeline with its augmentation."
    )
    return said if far else ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Robustness(Result):
    """Loss, accuracy and calibration error: `accuracy[s, c]` with `statistics[s]` after change c.

    Change 0 is none, change c of `kinds[c]`, `schemes[c]` and `sizes[c]`. BatchNorm's `statistics` are
    the stored ones (`"as is"`), those of training batches after the change (`"recalibrated"`), or of
    each micro-batch (`"batch"`). Accuracy and calibration error are fractions, NaN without classes.
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
        if not isinstance(change, Change):
            raise TypeError(f"place() takes a change such as Rounding(4), got {change!r}.")
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

        check_number("drop", drop)
        check_share("confidence", confidence, below=True)
        statistics = statistics or self.statistics[0]
        if statistics not in self.statistics:
            raise ValueError(f"statistics must be one of {self.statistics}, got {statistics!r}.")
        if lacking := self._lacking():
            raise ValueError(f"noise_borne() needs {lacking}.")
        here = self.statistics.index(statistics)
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

    def _lacking(self) -> str:
        """What `noise_borne` needs and this result does not have."""
        if self.draws < 2:
            return f"at least 2 draws, got {self.draws}"
        if "weight noise" not in self.kinds:
            return "weight noise among the changes, and none was measured"
        unknown = bool(self.accuracy.isnan().all())
        return "an accuracy: outputs are no logits, or targets are not classes" * unknown

    @property
    def borne(self) -> dict[str, float]:
        """`noise_borne()` by BatchNorm's statistics; empty where it was not measured."""
        known = () if self._lacking() else self.statistics
        return {way: self.noise_borne(statistics=way) for way in known}

    @property
    def recalibration_shift(self) -> float:
        """By how much recalibrating alone moves the accuracy of the unchanged model."""
        if "recalibrated" not in self.statistics:
            return math.nan
        return float(self.accuracy[1, 0] - self.accuracy[0, 0])

    def table(self, form: Literal["text", "markdown", "csv"] = "text") -> str:
        """One line a change; accuracy in per cent, with the standard deviation over draws."""
        from steppe.lab.tables import Table

        names = {"accuracy": "accuracy %", "loss": "loss", "ece": "ECE %"}
        if self.accuracy[0].isnan().all():
            names = {"loss": "loss"}
        ways = len(self.statistics)
        header = ["change"]
        for way in self.statistics:
            header += [f"{name}, {way}" if ways > 1 else name for name in names.values()]
        values, spread = {metric: getattr(self, metric) for metric in names}, self.spread()

        def cell(metric: str, s: int, c: int) -> str:
            value = float(values[metric][s, c])
            if metric == "loss":
                return f"{value:.4g}"
            several = metric == "accuracy" and self.counts[c] > 1
            return f"{100 * value:.1f}" + f" ± {100 * float(spread[s, c]):.1f}" * several

        lines = [
            (label, *(cell(metric, s, c) for s in range(ways) for metric in names))
            for c, label in enumerate(self.labels)
        ]
        return Table(tuple(header), tuple(lines), notes=self.notes()).render(form)

    __str__ = table

    def notes(self) -> tuple[str, ...]:
        """What a reader of the table must know."""
        o = self.origin
        said = [
            f"{o['samples']} samples, {o['parameters']} weights; changed: {len(self.changed)} tensors"
            + (" (two or more dimensions, no embeddings)." if self.include == "matrices" else ".")
        ]
        if "rounding" in self.kinds:
            levels = "2^bits - 1 levels (2 bits: -1, 0, 1)"
            said.append(f"Rounding: symmetric, to nearest, {levels}, one scale as named.")
        if max(self.counts) > 1:
            over = f"{self.draws} draw{'s' * (self.draws > 1)} taken with both signs"
            said.append(f"Noise: mean ± standard deviation over {over}.")
        if borne := self.borne:
            said.append(f"{BORNE}: {', '.join(f'{r:g} {way}' for way, r in borne.items())}.")
        if "recalibrated" in self.statistics:
            shift, count = self.recalibration_shift, self.recalibration_samples
            moved = f"Recalibrating alone moves the unchanged model by {100 * shift:+.2f} points."
            moved = moved_words({"": shift}) or moved * (not math.isnan(shift))
            said.append(
                f"Recalibrated from {count} training samples after the change. {moved}".strip()
            )
        elif self.norms and self.statistics == ("as is",):
            more = "training batches (recalibrate=) show them recalibrated"
            said.append(f"BatchNorm statistics as stored; {more}.")
        return tuple(said)

    def to_dict(self) -> dict[str, Any]:
        """Settings, noise borne, and for each change its metrics by name and BatchNorm's statistics."""
        changes: list[dict[str, Any]] = [{"label": label} for label in self.labels]
        for m, name in enumerate(METRICS):
            mean, spread = self._over_draws(name, _mean), self._over_draws(name, _std)
            for (c, change), (s, way) in product(enumerate(changes), enumerate(self.statistics)):
                draws = self.values[m, s, c, : self.counts[c]]
                found = {"mean": mean[s, c], "spread": spread[s, c], "draws": draws}
                change.setdefault(way, {})[name] = plain(found)
        whole = {**super().to_dict(), "noise_borne": self.borne, "changes": changes}
        del whole["values"]
        return whole

    def _over_draws(self, metric: str, number: Callable[[Tensor], Tensor]) -> Tensor:
        if metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}.")
        values = self.values[METRICS.index(metric)]
        return torch.stack([number(values[:, c, :n]) for c, n in enumerate(self.counts)], 1)


def _mean(draws: Tensor) -> Tensor:
    return draws.mean(1)


def _std(draws: Tensor) -> Tensor:
    return draws.std(1) if draws.shape[1] > 1 else torch.full_like(draws[:, 0], torch.nan)
