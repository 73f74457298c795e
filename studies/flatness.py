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
}
FEWEST = 10
"""Models below which no correlation is shown."""
Correlations = dict[str, dict[str, dict[str, float]]]
"""By place (with its n), measure and change."""
TITLE = "Is it flatness?"
CAPTION = (
    "Spearman's rank correlation, over the final models of all methods and seeds at default strengths and "
    "at rise 0.2, between a measure of sharpness and the points of test accuracy that a change costs. "
    "Above 0: sharper models lose more. n is the number of models."
)


def correlations(found: Sequence[Findings]) -> Correlations:
    """Of each setting with enough models that have both; a measure that is missing is left out."""
    made: Correlations = {}
    for place, findings, setting in places(found):
        models = _models(findings, setting)
        ranked = {
            name: {change: _spearman(models, measure, change) for change in CHANGES}
            for measure, name in MEASURES.items()
            if models and all(model.get(measure) is not None for model in models)
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
                lost = {change: left[UNCHANGED] - left[change] for change in CHANGES}
                models.append({**{m: line.minima.get(m) for m in MEASURES}, **lost})
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
    figure, axes = panels(len(names), width=3.6, share=True)
    for axis, name in zip(axes, names, strict=True):
        for i, (place, ranked) in enumerate(made.items()):
            if name in ranked:
                values = [ranked[name][change] for change in CHANGES]
                axis.plot(values, **marked_style(i), label=place)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(CHANGES)), CHANGES, fontsize="small")
        axis.set_xlim(-0.5, len(CHANGES) - 0.5)
        axis.set_ylim(-1.05, 1.05)
        axis.set_title(name, fontsize="medium")
    axes[0].set_ylabel("rank correlation with the loss of accuracy")
    shared_legend(figure, axes, columns=2)
    return figure
