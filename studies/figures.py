"""The figures: one for each primary question."""

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from steppe.lab.statistics import Difference, mean_std
from steppe.report.canvas import error_bars, marked_style, panels, shared_legend
from studies.comparisons import MARGIN, MATCH, RANDOM_GAINS, compared, places, trial_gains
from studies.definitions import FEW, LARGE
from studies.findings import BESIDE, CHANGES, UNCHANGED, Findings

OVERFIT = 5.0
"""Points from training to test accuracy from which on a baseline overfits."""
UNITS = ("ratio", "rise")
FLOOR = -15.0
"""Below so many points a figure of trials shows nothing more."""
Series = Mapping[str, Mapping[str, Difference]]
"""By what a mark stands for its differences, each in a row with a name."""


def cost_figure(found: Sequence[Findings]) -> Figure:
    """The gain of every method in every setting."""
    series: dict[str, dict[str, Difference]] = {}
    for each in compared(found, RANDOM_GAINS):
        series.setdefault(each.claim.first, {})[each.place] = each.difference
    return _rows_figure(series, "points of test accuracy gained over the baseline")


def match_figure(found: Sequence[Findings]) -> Figure:
    """m-ARWP against SAM in every setting, and the margin of equivalence."""
    made = {each.place: each.difference for each in compared(found, MATCH)}
    figure = _rows_figure({"m-ARWP − SAM": made}, "m-ARWP − SAM, points of test accuracy")
    figure.axes[0].axvspan(-MARGIN, MARGIN, color="grey", alpha=0.25, linewidth=0)
    return figure


def _rows_figure(series: Series, label: str) -> Figure:
    """A row for each place, in it a mark with its interval for each series."""
    places = list(dict.fromkeys(place for rows in series.values() for place in rows))
    height = (0.16 * len(series) + 0.18) * len(places) + 0.6
    figure, (axis,) = panels(1, width=7.5, height=height)
    for i, (name, found) in enumerate(series.items()):
        shift = 0.7 * ((i + 0.5) / len(series) - 0.5)
        wide = [each.high - each.mean for each in found.values()]
        means = [each.mean for each in found.values()]
        heights = [places.index(place) + shift for place in found]
        error_bars(axis, i, means, heights, None, name, xerr=wide, linestyle="none")
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(places)), places, fontsize="small")
    axis.set_ylim(len(places) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel(label)
    if len(series) > 1:
        shared_legend(figure, [axis])
    return figure


def gain_figure(found: Sequence[Findings]) -> Figure:
    """Gains against the baseline's gap from training to test accuracy."""
    series: dict[str, list[tuple[float, Difference]]] = {}
    for each in compared(found, RANDOM_GAINS):
        gap = each.findings.gap(each.setting)
        series.setdefault(each.claim.first, []).append((gap, each.difference))
    figure, axes = panels(len(series), width=2.6, columns=4, share=True)
    for i, (axis, (name, points)) in enumerate(zip(axes, series.items(), strict=True)):
        gaps, means = [gap for gap, _ in points], [each.mean for _, each in points]
        wide = [each.high - each.mean for _, each in points]
        error_bars(axis, i, gaps, means, wide, "", linestyle="none")
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.axvline(OVERFIT, color="grey", linewidth=0.8, linestyle="--")
        axis.set_title(name)
    figure.supxlabel("baseline: training − test accuracy, points", fontsize="medium")
    axes[0].set_ylabel("points gained over the baseline")
    return figure


def survival_figure(found: Sequence[Findings]) -> Figure:
    """Accuracy as trained and after each change, a panel for each setting that was measured."""
    shown = []
    for place, findings, setting in places(found):
        rows = {}
        for i, name in enumerate(map(setting.called, (*FEW[:2], *BESIDE, *LARGE))):
            row = findings.row(setting, "defaults", name)
            scores = [list(row.scores(after).values()) for after in (UNCHANGED, *CHANGES)]
            if any(scores[1:]):
                rows[name] = i, scores  # a method has one style, whichever others were run
        if rows:
            counts = sorted({len(scores[-1]) for _, scores in rows.values()})
            title = textwrap.fill(f"{place}, n = {' to '.join(map(str, counts))}", 50)
            shown.append((title, rows))
    figure, axes = panels(len(shown), width=4.2, columns=2)
    for axis, (title, rows) in zip(axes, shown, strict=True):
        for name, (i, scores) in rows.items():
            means, spread = zip(*map(mean_std, scores), strict=True)
            beside = [x + 0.07 * (i - len(rows) / 2) for x in range(len(scores))]
            error_bars(axis, i, beside, means, spread, name, elinewidth=0.8)
        axis.set_xticks(range(1 + len(CHANGES)), ["unchanged", *CHANGES], fontsize="small")
        axis.set_ylabel("test accuracy, %")
        axis.set_title(title, fontsize="medium")
    shared_legend(figure, axes)
    return figure


def transfer_figure(found: Sequence[Findings]) -> Figure:
    """What each strength gained in the trials of each setting, a panel for each unit."""
    shown = {unit: gains for unit in UNITS if (gains := trial_gains(found, unit))}
    figure, axes = panels(len(shown), width=8.0, height=3.4, columns=1)
    for axis, (unit, gains) in zip(axes, shown.items(), strict=True):
        for i, (place, tried) in enumerate(gains.items()):
            clipped = [max(gain, FLOOR) for gain in tried.values()]
            axis.plot(list(tried), clipped, **marked_style(i), label=place)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        values = sorted({value for tried in gains.values() for value in tried})
        axis.set_xticks(values, [f"{value:.2g}" for value in values])
        axis.set_xlabel(f"{unit} of RWP")
        axis.set_ylabel("validation points over the baseline")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure
