"""The figures of the page, from lines of evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from steppe.analysis import Landscape, RadiusCurve
from steppe.lab.runs import Record
from steppe.lab.statistics import half_width, mean_std
from steppe.lab.tables import join_words
from steppe.report.canvas import line_style, panels, shared_legend
from steppe.report.figures import landscape_figure, radius_figure
from steppe.report.studies import (
    MARKS,
    Group,
    convergence_figure,
    generalisation_figure,
    sensitivity_figure,
)
from studies.definitions import LENGTHS, Setting
from studies.evidence import Line
from studies.findings import Claim, Findings
from studies.gains import gainers, gains_figure, range_words
from studies.plan import Part, at_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLLAPSE = 20.0
SHOWN = (0.6, 1.2)
"""Figure 2 shows RWP and m-RWP at these strengths."""


@dataclass(frozen=True)
class Picture:
    """A figure that has not been drawn yet, and its caption."""

    caption: str
    draw: Callable[[], Figure]


def pictures(findings: Findings) -> dict[str, Picture]:
    """By file name all that there are lines for."""
    drawn: dict[str, Picture] = {}
    if any(gainers(findings, setting) for setting in findings.study.settings):
        drawn["gains"] = Picture(
            "Points of test accuracy gained over plain training from the same seeds: every method "
            "and control, with intervals at the level of Holm's test.",
            partial(gains_figure, findings),
        )
    lengths = [s for s in findings.study.settings if s.lengths and _gains(findings, s)]
    if lengths:
        drawn["lengths"] = Picture(
            "Gain over SGD trained for as many steps, against the length of training (1 is the "
            "usual one), default strengths. Bars: 95 % t-intervals over paired seeds, uncorrected."
            f"{_left_out(findings, lengths)}",
            partial(_length_figure, findings, lengths),
        )
    for setting in findings.study.settings:
        drawn |= _sweep_figures(findings, setting)
        drawn |= _minima_figures(findings, setting)
    return drawn


def _sweep_figures(findings: Findings, setting: Setting) -> dict[str, Picture]:
    drawn: dict[str, Picture] = {}
    ranges = {}
    for title, name in (("strength of RWP", "RWP"), ("strength of m-RWP", "m-RWP")):
        groups = _points(findings, setting, title)
        if len(groups) > 1:
            ranges[name] = groups
    if len(ranges) == 2:
        chosen: dict[str, list[Line]] = {}
        for name, points in ranges.items():
            for lines in points:
                strength = lines[0].result.strength
                if strength is not None and strength[1] in SHOWN:
                    chosen[f"{name}, ratio {strength[1]:g}"] = lines
        n = min(len(lines) for points in ranges.values() for lines in points)
        if chosen:
            groups_of = {name: _group(lines) for name, lines in chosen.items()}
            curves = {name: [_records(line) for line in lines] for name, lines in chosen.items()}
            drawn[f"{setting.name}-figure2"] = Picture(
                f"Figure 2: convergence of RWP and m-RWP ({setting.title}). Training loss at the "
                f"true weights, un-augmented; means over n = {n} seeds.",
                partial(convergence_figure, groups_of, curves),
            )
        by_name = {name: [_group(lines) for lines in points] for name, points in ranges.items()}
        drawn[f"{setting.name}-figure3"] = Picture(
            f"Figure 3: RWP and m-RWP over six strengths ({setting.title}), n = {n} seeds or more a "
            "point: the gap from training to test accuracy against the final training loss at the "
            f"true weights, and test accuracy.{_noise_words(setting)}",
            partial(generalisation_figure, by_name),
        )
    studies = {}
    options = {
        "eta and exponent": ("ARWP", "eta", "exponent"),
        "eta and beta": ("ARWP", "eta", "beta"),
        "ratio and lam": ("m-ARWP", "strength", "lam"),
    }
    for title, (name, first, second) in options.items():
        groups = _points(findings, setting, title)
        if len(groups) > 1:
            studies[f"{name}: {title}"] = (first, second, [_group(lines) for lines in groups])
    if studies:
        drawn[f"{setting.name}-figure4"] = Picture(
            f"Figure 4: test accuracy over options of ARWP and m-ARWP ({setting.title}); what is not "
            "varied is at its default.",
            partial(sensitivity_figure, studies),
        )
    return drawn


def _noise_words(setting: Setting) -> str:
    if not setting.config.label_noise:
        return ""
    return " Training accuracy is on labels of which some are wrong, hence gaps below zero."


def _points(findings: Findings, setting: Setting, title: str) -> list[list[Line]]:
    """The finished runs of each point of a sweep that has any."""
    names = [e.name for e in findings.plan.of(setting, "sweeps") if e.name.startswith(f"{title}:")]
    found = []
    for name in dict.fromkeys(names):
        lines = findings.lines(setting, "sweeps", name).values()
        if finished := [line for line in lines if line.result.status == "finished"]:
            found.append(finished)
    return found


def _group(lines: list[Line]) -> Group:
    return Group(tuple(line.result for line in lines))


def _records(line: Line) -> list[Record]:
    """A line's curves as the records they came from."""
    names = ("train_nll", "test_accuracy")
    columns = [line.curves["epoch"], *(line.curves[name] for name in names)]
    return [dict(zip(("epoch", *names), row, strict=True)) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Gain:
    """What a method gains over plain training of the same length: mean, half its interval, pairs."""

    length: float
    mean: float
    half: float
    n: int


def _gains(findings: Findings, setting: Setting) -> dict[str, list[Gain]]:
    """By method its gains at two or more lengths."""
    base, *methods = [setting.called(method) for method in setting.lengths]
    found: dict[str, list[Gain]] = {}
    for name in methods:
        for length in sorted((1.0, *LENGTHS)):
            part: Part = "defaults" if length == 1 else "lengths"
            rows = at_length(name, length), at_length(base, length)
            values = findings.pairs(Claim(setting.name, part, *rows))
            if len(values) > 1:
                mean, std = mean_std(values)
                gain = Gain(length, mean, half_width(std, len(values)), len(values))
                found.setdefault(name, []).append(gain)
    return {name: points for name, points in found.items() if len(points) > 1}


def _collapsed(gains: list[Gain]) -> bool:
    """Whether a method did not train at some length: it would flatten all other lines."""
    return min(gain.mean for gain in gains) < -COLLAPSE


def _left_out(findings: Findings, settings: list[Setting]) -> str:
    names = [
        f"{name} ({setting.title})"
        for setting in settings
        for name, gains in _gains(findings, setting).items()
        if _collapsed(gains)
    ]
    why = f"more than {COLLAPSE:g} points below SGD at some length"
    return f" Not shown, since {why}: {join_words(names)}." if names else ""


def _length_figure(findings: Findings, settings: list[Setting]) -> Figure:
    figure, axes = panels(len(settings), width=4.2, columns=2)
    names = list(dict.fromkeys(s.called(method) for s in settings for method in s.lengths[1:]))
    for axis, setting in zip(axes, settings, strict=True):
        shown = {n: g for n, g in _gains(findings, setting).items() if not _collapsed(g)}
        for name, gains in shown.items():
            i = names.index(name)  # a method looks the same in all panels
            axis.errorbar(
                [gain.length * 2 ** (0.04 * (i - 2)) for gain in gains],
                [gain.mean for gain in gains],
                yerr=[gain.half for gain in gains],
                **line_style(i),
                marker=MARKS[i % len(MARKS)],
                capsize=2,
                label=name,
            )
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted((1.0, *LENGTHS)), ["¼", "½", "1", "2"])
        axis.set_xlim(0.21, 2.4)
        axis.set_xlabel("length of training")
        axis.set_ylabel("points gained over SGD")
        counts = [gain.n for gains in shown.values() for gain in gains]
        axis.set_title(f"{setting.title}, n = {range_words(counts)}", fontsize="medium")
    shared_legend(figure, axes)
    return figure


def _minima_figures(findings: Findings, setting: Setting) -> dict[str, Picture]:
    found: dict[str, Record] = {}
    for name in map(setting.called, setting.methods):
        line = findings.lines(setting, "defaults", name).get(0)
        if line is not None and "samples" in line.minima:
            found[name] = line.minima
    drawn = {}
    about = "on {samples} un-augmented training images, BatchNorm statistics recomputed"
    planes = {name: _landscape(m) for name, m in found.items() if "landscape" in m}
    if len(planes) > 1:
        words = about.format(**next(iter(found.values())))
        drawn[f"{setting.name}-landscapes"] = Picture(
            "Loss around the minima of one seed, default strengths, the same two filter-normalised "
            f"directions' seeds, data and colour scale for all, {words}.",
            partial(landscape_figure, planes),
        )
    radii = {name: _radius(m) for name, m in found.items() if "radius" in m}
    if radii:
        words = about.format(**next(iter(found.values())))
        drawn[f"{setting.name}-radius"] = Picture(
            f"Expected loss of the SGD model (seed 0) against the radius of a perturbation, {words}.",
            partial(radius_figure, radii),
        )
    return drawn


def _landscape(minima: Mapping[str, Any]) -> Landscape:
    made = minima["landscape"]
    axis = _tensor(made["a"])
    loss = _tensor(made["loss"])
    return Landscape(
        origin={}, a=axis, b=axis.clone(), loss=loss, centre=made["centre"], seeds=(0, 1)
    )


def _radius(minima: Mapping[str, Any]) -> RadiusCurve:
    made = minima["radius"]
    loss = _tensor(made["loss"])
    return RadiusCurve(
        origin={"samples": minima["samples"]},
        radii=_tensor(made["radii"]),
        loss=loss,
        error=_tensor(made["error"]),
        theory=torch.full_like(loss, math.nan),
        base=made["base"],
        kinds=tuple(made["kinds"]),
        batch=made["batch"],
        directions=made["directions"],
        scale="isotropic",
        steps=1,
        seed=0,
    )


def _tensor(values: Any) -> torch.Tensor:
    """Numbers from JSON, where what was not finite is None."""
    if isinstance(values, list) and values and isinstance(values[0], list):
        return torch.stack([_tensor(row) for row in values])
    numbers = [math.nan if value is None else value for value in values]
    return torch.tensor(numbers, dtype=torch.float64)
