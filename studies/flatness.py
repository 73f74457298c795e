"""Is it flatness? Rank correlations between sharpness and the damage done by compression."""

import math
import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure
from scipy import stats

from steppe.report.canvas import marked_style, panels, shared_legend
from studies.comparisons import places
from studies.definitions import Setting
from studies.findings import CHANGES, UNCHANGED, Findings

MEASURES = {
    "largest_eigenvalue": "largest eigenvalue",
    "adaptive_sharpness": "adaptive sharpness, worst case",
    "average_sharpness": "adaptive sharpness, average case",
    "plain_sharpness": "sharpness, worst case",
    "plain_average": "sharpness, average case (trace)",
    "weight_norm": "weight norm",
}
FEWEST = 10
"""Models below which no correlation is shown."""
AS_IS = ", as is"
LOSSES = tuple(f"{change}{way}" for way in ("", AS_IS) for change in CHANGES)
"""Changes, with BatchNorm's statistics recomputed after them and as training left them."""
Correlations = dict[str, dict[str, dict[str, float]]]
"""By place (with its n), measure and change."""
TITLE = "Is it flatness?"
CAPTION = (
    "Spearman's rank correlation, over the final models of all methods and seeds at default strengths and "
    "at rise 0.2 (their number: n), between what was measured of a model and the points of test accuracy that a "
    "change costs. Above 0: more of it, more lost. *As is*: BatchNorm statistics not recomputed."
)


def correlations(found: Sequence[Findings]) -> Correlations:
    """Of each setting with enough models that have both; a measure that is missing is left out."""
    made: Correlations = {}
    for place, findings, setting in places(found):
        models = _models(findings, setting)
        known = set.intersection(*map(set, models)) if models else set()
        lost = [change for change in LOSSES if change in known]
        ranked = {
            name: {change: _spearman(models, measure, change) for change in lost}
            for measure, name in MEASURES.items()
            if measure in known
        }
        if len(models) >= FEWEST and ranked:
            made[f"{place}, n = {len(models)}"] = ranked
    return made


def _models(findings: Findings, setting: Setting) -> list[dict[str, float]]:
    """What is known of each final model: its measures, and what each change takes from it."""
    models = []
    for name in setting.compressed:
        for line in findings.row(setting, "defaults", name).lines.values():
            left = line.minima.get("robustness", {})
            if "largest_eigenvalue" in line.minima and UNCHANGED in left:
                lost = {
                    f"{change}{way}": of[UNCHANGED] - of[change]
                    for way, of in (("", left), (AS_IS, left.get("as is")))
                    for change in (CHANGES if of else ())
                }
                has = {m: line.minima[m] for m in MEASURES if line.minima.get(m) is not None}
                models.append({**has, **lost})
    return models


def _spearman(models: Sequence[dict[str, float]], measure: str, change: str) -> float:
    pairs = [(model[measure], model[change]) for model in models]
    return float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)


def flatness_words(made: Correlations) -> str:
    """For each measure the median correlation and its range over settings and changes."""
    clauses = []
    for name in MEASURES.values():
        every = (v for ranked in made.values() for v in ranked.get(name, {}).values())
        values = [v for v in every if math.isfinite(v)]
        if values:
            middle, low, high = statistics.median(values), min(values), max(values)
            clauses.append(f"{name} {middle:+.2f} ({low:+.2f} to {high:+.2f})")
    return (
        "Median rank correlation with the damage, and its range over settings and changes: "
        f"{'; '.join(clauses)}. Correlation over methods is not proof that flatness is the cause."
    ).replace("-", "−")


def flatness_figure(made: Correlations) -> Figure:
    """A panel for each measure, a line for each setting, a point for each change."""
    names = [name for name in MEASURES.values() if any(name in ranked for ranked in made.values())]
    figure, axes = panels(len(names), width=3.6, columns=2, share=True)
    for axis, name in zip(axes, names, strict=True):
        for i, (place, ranked) in enumerate(made.items()):
            if name in ranked:
                values = [ranked[name].get(change, math.nan) for change in LOSSES]
                axis.plot(values, **marked_style(i), label=place)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(LOSSES)), LOSSES, fontsize="small", rotation=90)
        axis.set_xlim(-0.5, len(LOSSES) - 0.5)
        axis.set_ylim(-1.05, 1.05)
        axis.set_title(name, fontsize="medium")
    figure.supylabel("rank correlation with the loss of accuracy", fontsize="medium")
    shared_legend(figure, axes, columns=1)
    return figure
