"""What was measured at the minima: which are flattest, and how far a perturbation can go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from steppe.lab.statistics import ENOUGH, half_width, mean_std, mean_words
from steppe.lab.tables import Table, signed
from studies.definitions import Setting
from studies.findings import HOW, Claim, Findings, places
from studies.plan import Part

MEASURES = {
    "largest_eigenvalue": "the largest Hessian eigenvalue",
    "adaptive_sharpness": "adaptive sharpness",
    "weight_norm": "the norm of the weights",
}
FEWEST = 3
"""Methods that must be measured before one of them is called the flattest."""
RISE = 0.1
"""The rise of the loss at which radii are compared."""


def minima_table(findings: Findings, setting: Setting, part: Part) -> Table | None:
    """All measures by method, mean ± standard deviation over seeds; None without any."""
    rows = []
    for name in findings.names(setting, part):
        if not _values(findings, setting, part, name):
            continue
        values = [_values(findings, setting, part, name, key) for key in MEASURES]
        cells = [mean_words(each, ".3g", ".2g") for each in values]
        rows.append((name, *cells, str(len(_values(findings, setting, part, name)))))
    if not rows:
        return None
    failed = [
        f"{name}: {line.minima['failed']}"
        for name in findings.names(setting, part)
        for line in findings.lines(setting, part, name).values()
        if "failed" in line.minima
    ]
    notes = _how(findings)
    if failed:
        notes += (f"{len(failed)} models could not be measured; the first: {failed[0]}",)
    header = ("method", "largest eigenvalue", "adaptive sharpness", "‖w‖", "n")
    return Table(header, tuple(rows), f"Minima: {setting.title}, {HOW[part]}", notes)


def _how(findings: Findings) -> tuple[str, ...]:
    lines = findings.evidence.lines.values()
    measured = next(line.minima for line in lines if "samples" in line.minima)
    return (
        f"On {measured['samples']} un-augmented training images, the same for all; BatchNorm "
        "statistics recomputed on them wherever the weights are. Adaptive sharpness: the largest "
        f"rise of the loss within ‖eps / |w|‖ ≤ {measured['sharpness_rho']:g}, parts of 128 images.",
    )


@dataclass(frozen=True)
class Ranking:
    """Methods by a measure of their minima and by test accuracy, both means over seeds."""

    measured: dict[str, float]
    accuracy: dict[str, float]
    seeds: int
    """Of the method that has the fewest."""

    @property
    def flattest(self) -> str:
        return min(self.measured, key=lambda name: self.measured[name])

    @property
    def best(self) -> str:
        return max(self.accuracy, key=lambda name: self.accuracy[name])

    @property
    def correlation(self) -> float:
        """Spearman's, over the methods."""
        return _rank_correlation(list(self.measured.values()), list(self.accuracy.values()))


def ranking(findings: Findings, setting: Setting, part: Part, key: str) -> Ranking | None:
    """The methods that were measured; None where they are too few to call one the flattest."""
    names = map(setting.called, setting.methods)
    found = {
        name: values for name in names if (values := _values(findings, setting, part, name, key))
    }
    if len(found) < FEWEST:
        return None
    return Ranking(
        {name: mean_std(values)[0] for name, values in found.items()},
        {name: findings.mean(setting, part, name) for name in found},
        min(map(len, found.values())),
    )


def flatness_answer(findings: Findings) -> list[str]:
    """The method with the flattest minima against the one with the best accuracy."""
    found = []
    for setting, part, place in places(findings):
        for key, words in MEASURES.items():
            ranks = ranking(findings, setting, part, key)
            if ranks is None:
                continue
            flattest, best, measured = ranks.flattest, ranks.best, ranks.measured
            sentence = f"{place}: {words} is smallest for {flattest} ({measured[flattest]:.3g})"
            if flattest == best:
                sentence += ", and its mean test accuracy is the highest."
            else:
                pairs = findings.pairs(Claim(setting.name, part, flattest, best))
                mean, std = mean_std(pairs)
                sentence += (
                    f"; the best is {best} ({measured[best]:.3g}), more accurate by "
                    f"{_spread(-mean, std, len(pairs))} points."
                )
            sentence += (
                f" Rank correlation with accuracy over {len(measured)} methods: "
                f"{signed(ranks.correlation)}."
            )
            if ranks.seeds < ENOUGH:
                sentence += " Too few seeds for a verdict."
            found.append(sentence)
    return found


def _values(
    findings: Findings, setting: Setting, part: Part, name: str, key: str = "largest_eigenvalue"
) -> list[float]:
    lines = findings.lines(setting, part, name).values()
    return [line.minima[key] for line in lines if line.minima.get(key) is not None]


def _spread(mean: float, std: float, n: int) -> str:
    """A mean with its own 95 % interval."""
    if n < 2:
        return f"{signed(mean)} (n = {n})"
    wide = half_width(std, n)
    return f"{signed(mean)} [{signed(mean - wide)}, {signed(mean + wide)}] (n = {n})"


def _rank_correlation(first: list[float], second: list[float]) -> float:
    if len(set(first)) == 1 or len(set(second)) == 1:
        return 0.0
    return float(stats.spearmanr(first, second).statistic)


def radius_answer(findings: Findings) -> list[str]:
    """The radii at which the loss of plain training's model has risen by the same amount."""
    found = []
    for setting in findings.study.settings:
        line = findings.lines(setting, "defaults", setting.plain).get(0)
        curve = {} if line is None else line.minima.get("radius", {})
        if not curve:
            continue
        reached = {
            kind: _radius_at(curve["radii"], losses, curve["base"] + RISE)
            for kind, losses in zip(curve["kinds"], curve["loss"], strict=True)
        }
        random, ascent = reached["random"], reached["sam"]
        words = f"{setting.title}: the loss of one SGD model (n = 1) rises by {RISE:g} at radius "
        if math.isinf(random) or math.isinf(ascent):
            words += f"{_far(random, curve)} in random directions and {_far(ascent, curve)} "
            found.append(f"{words}along the gradient of {curve['batch']} samples.")
            continue
        words += f"{random:.3g} in random directions and {ascent:.3g} along the gradient of "
        words += f"{curve['batch']} samples: {random / ascent:.3g} times as far, "
        orders = math.log10(random / ascent)
        found.append(f"{words}{orders:.1f} orders of magnitude.")
    return found


def _far(radius: float, curve: dict[str, list[float]]) -> str:
    return f"above {curve['radii'][-1]:g}" if math.isinf(radius) else f"{radius:.3g}"


def _radius_at(radii: Sequence[float], losses: Sequence[float | None], level: float) -> float:
    """Where the loss first reaches a level, between radii on a logarithmic scale; else infinity.

    >>> round(_radius_at([0.1, 1.0, 10.0], [1.0, 1.0, 2.0], 1.5), 3)
    3.162
    """
    before: tuple[float, float] | None = None
    for radius, loss in zip(radii, losses, strict=True):
        if loss is None or loss >= level:
            if before is None or loss is None:
                return radius
            part = (level - before[1]) / (loss - before[1])
            return float(before[0] * (radius / before[0]) ** part)
        before = (radius, loss)
    return math.inf
