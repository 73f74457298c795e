"""The figure of any analysis result, and figures of analyses that are stored with runs."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe import analysis
from steppe.analysis import Result
from steppe.lab.errors import LabError
from steppe.lab.runs import DEFAULT_STORE, Run
from steppe.lab.sentences import NAMES
from steppe.report import figures
from steppe.report.analyses import FOLDER, load
from steppe.report.canvas import (
    COLOURS,
    error_bars,
    line_style,
    named,
    panels,
    save_figure,
    shared_legend,
)
from steppe.report.sections import interval
from steppe.report.subjects import run_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from steppe.lab.comparison import Comparison

logger = logging.getLogger("steppe")


def figure_of(results: Result | Mapping[str, Result], **options: Any) -> Figure:
    """The figure of one result, or of several of one kind by name; options are the figure's own."""
    by_name = named(results)
    kinds = {type(result) for result in by_name.values()}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"One figure shows one kind of result, got {names}.")
    drawers: dict[type[Result], Any] = {
        analysis.Landscape: figures.landscape_figure,
        analysis.Spectrum: figures.spectrum_figure,
        analysis.RadiusCurve: figures.radius_figure,
        analysis.Eigenvalues: eigenvalue_figure,
        analysis.Sharpness: sharpness_figure,
        analysis.Robustness: figures.robustness_figure,
        analysis.Ensemble: ensemble_figure,
    }
    (kind,) = kinds
    if kind not in drawers:
        raise TypeError(f"There is no figure of a {kind.__name__}.")
    figure: Figure = drawers[kind](by_name, **options)
    return figure


def eigenvalue_figure(results: Mapping[str, analysis.Eigenvalues]) -> Figure:
    """The largest eigenvalues by rank, with their residual bounds."""
    figure, (axis,) = panels(1, width=5.0)
    for i, (name, result) in enumerate(results.items()):
        ranks = range(1, len(result.values) + 1)
        error_bars(axis, i, ranks, result.values, result.residuals, name)
    axis.set(xlabel="rank", ylabel="eigenvalue of the Hessian")
    axis.xaxis.get_major_locator().set_params(integer=True)
    if any(results):
        axis.legend(frameon=False)
    return figure


def sharpness_figure(results: Mapping[str, analysis.Sharpness]) -> Figure:
    """The rise of the loss: its mean with a standard error, and each part of m samples as a dot."""
    figure, (axis,) = panels(1, width=5.0)
    for i, result in enumerate(results.values()):
        colour = COLOURS[i % len(COLOURS)]
        axis.bar(i, result.value, color=colour, alpha=0.35, width=0.6)
        axis.errorbar(i, result.value, yerr=result.error, color=colour, capsize=4)
        parts = result.rises.flatten()
        axis.plot([i] * len(parts), parts, "o", color=colour, markersize=3, alpha=0.6)
    first = next(iter(results.values()))
    axis.set_xticks(range(len(results)), list(results))
    axis.set(xlim=(-1, len(results)), ylabel="rise of the loss")
    kind = f"{first.case} case{', adaptive' if first.adaptive else ''}"
    axis.set_title(f"{kind}, rho {first.rho:g}, m = {first.m}", fontsize="medium")
    return figure


def ensemble_figure(results: Mapping[str, analysis.Ensemble]) -> Figure:
    """NLL, accuracy and calibration error against the number of draws averaged; dotted: single model."""
    figure, axes = panels(3, width=3.2)
    for place, (axis, metric) in enumerate(zip(axes, ("NLL", "accuracy %", "ECE %"), strict=True)):
        scale = 100 if place else 1
        for i, (name, result) in enumerate(results.items()):
            values = scale * result.averaged[:, place]
            style = {**line_style(i), "marker": "o", "label": name or "average of draws"}
            axis.plot(range(1, len(values) + 1), values, **style)
            axis.axhline(scale * result.single[place], color=line_style(i)["color"], ls=":")
        axis.plot([], [], color="grey", ls=":", label="single model")
        axis.set(xlabel="draws averaged", ylabel=metric)
        axis.xaxis.get_major_locator().set_params(integer=True)
    shared_legend(figure, axes)
    return figure


def comparison_figure(comparison: Comparison) -> Figure:
    """The metric of each method with its 95 % interval and seeds, and the paired differences."""
    figure, axes = panels(2, width=4.4, columns=2)
    rows, example = comparison.rows, comparison.example
    places = range(len(rows), 0, -1)
    for index, (place, row) in enumerate(zip(places, rows, strict=True)):
        style = {"fmt": "o", "color": COLOURS[index % len(COLOURS)], "capsize": 4}
        low, mean, _ = interval(row, example.metric)
        values = row.values("test", example.metric)
        half = mean - low if math.isfinite(low) else None
        axes[0].errorbar([mean], [place], xerr=half, **style)
        axes[0].plot(values, [place] * len(values), ".", color=style["color"], alpha=0.5)
        found = row.difference
        if found is not None and found.n:
            wide = [[found.mean - found.low], [found.high - found.mean]] if found.n > 1 else None
            face = style["color"] if found.verdict in ("better", "worse") else "white"
            axes[1].errorbar([found.mean], [place], xerr=wide, mfc=face, **style)
    axes[1].axvline(0, color="grey", linewidth=0.8)
    way = "higher" if example.higher_is_better else "lower"
    name = NAMES.get(example.metric, example.metric)
    axes[0].set_xlabel(f"test {name} ({way} is better), 95 % interval")
    axes[1].set_xlabel(f"minus {comparison.baseline.label}, Holm-corrected; filled: significant")
    for axis, labels in ((axes[0], [row.label for row in rows]), (axes[1], [""] * len(rows))):
        axis.set_yticks(list(places), labels)
        axis.set_ylim(0.4, len(rows) + 0.6)
    return figure


def pictured(run: Run, name: str) -> tuple[Path, Path]:
    """The files of a stored analysis: its numbers, and its picture where matplotlib can draw one."""
    numbers = run.folder / FOLDER / f"{name}.npz"
    picture = numbers.with_suffix(".png")
    stored = load(run, name)
    old = not picture.exists() or picture.stat().st_mtime < numbers.stat().st_mtime
    if stored is not None and old:
        try:
            save_figure(figure_of({run_label(run): stored.result}), picture, formats=("png",))
        except (ImportError, ValueError) as error:  # a ValueError: nothing finite to show
            logger.info("no picture: %s", error)
    return numbers, picture


def analysis_figure(kind: str, runs: Sequence[tuple[str, list[Run]]], store: Path) -> Figure:
    """One figure of stored analyses: by each name that of the first of its runs which has one."""
    found: dict[str, Result] = {}
    missing: list[str] = []
    for name, its in runs:
        stored = next(filter(None, (load(run, kind) for run in its)), None)
        if stored is None:
            missing.append(its[0].name)
        else:
            found[name] = stored.result
    if missing:
        where = "" if store == DEFAULT_STORE else f" --store {shlex.quote(str(store))}"
        raise LabError(
            f"no {kind} is stored for {', '.join(missing)}. To measure it: "
            f"steppe analyze {kind} {shlex.join(missing)}{where}"
        )
    return figure_of(found)
