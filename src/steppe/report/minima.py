"""The sections of the page about analyses: robustness, landscapes, spectra, radius, sharpness."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from steppe.analysis import RadiusCurve, Result
from steppe.analysis.robustness_result import BORNE, moved_words
from steppe.lab.statistics import mean_std
from steppe.lab.survival import survival_table
from steppe.report import charts
from steppe.report.charts import Series, line_chart, shown, shown_within, tag, text
from steppe.report.gathered import Gathered
from steppe.report.maps import grid_of, heights_of, landscape_map, scale_bar
from steppe.report.sections import (
    Absent,
    Section,
    advice,
    captioned,
    columns,
    html_table,
    legend,
    note,
)
from steppe.report.survival import Groups, shared_curves

KINDS = {
    "random": "random directions",
    "sam": "adversarial, one step",
    "pgd": "adversarial, ascent",
}


def robustness_section(gathered: Gathered) -> Section | Absent:
    """The comparison's table after compression, and a chart for each change that was analysed."""
    body, command = _compressed(gathered), gathered.command("steppe analyze robustness")
    groups = gathered.every("robustness")
    if groups:
        body += _charts(gathered, groups)
    elif body:
        body += advice("Other sizes of these changes, noise and worse inputs: ", command)
    if not body:
        return Absent("Robustness", command)
    return Section("robustness", "Robustness", body)


def _compressed(gathered: Gathered) -> str:
    table = survival_table(gathered.comparison)
    if table is None:
        return ""
    whole = html_table(table.header, table.rows, first="method after compression")
    return whole + note(f"{table.title}.", *table.notes)


def _charts(gathered: Gathered, groups: Groups) -> str:
    found = shared_curves(groups)
    if found is None:
        words = (
            "The stored analyses of robustness were not measured alike (other seeds, samples or "
            "settings), so they are not drawn together. Analyse again: "
        )
        return advice(words, gathered.command("steppe analyze robustness --again"))
    label, curves = "accuracy %" if found[0] else "loss", found[1]
    drawn = []
    first = next(iter(curves.values()))
    for statistics, panels in first.items():
        for panel in panels:
            series = []
            for index, its in curves.items():
                x, y, halves = zip(*its[statistics][panel], strict=True)
                points = list(zip(x, y, strict=True))
                series.append(Series(gathered.rows[index].label, index, points, halves))
            way = f", BatchNorm {statistics}" if len(first) > 1 else ""
            caption = f"{panel[0].upper()}{panel[1:]}{way}."
            drawn.append(captioned(line_chart(series, panel, label), caption))
    about = "One run a method; bars are the standard deviation over draws of noise."
    if (runs := len(next(iter(groups.values())))) > 1:
        about = f"Mean over {runs} runs a method, of the same seeds, with its 95 % interval."
    # Methods must share the samples of a seed, seeds may differ.
    said = [origin_words(same_seed) for same_seed in zip(*groups.values(), strict=True)]
    origin = next((words for words in said if words.startswith("Not")), said[0])
    shifts = {i: mean_std([r.recalibration_shift for r in of])[0] for i, of in groups.items()}
    moved = moved_words({gathered.rows[i].label: shift for i, shift in shifts.items()})
    notes = filter(None, [_borne(gathered, groups), moved, about, origin])
    return legend(gathered, groups) + columns(drawn) + note(*notes)


def _borne(gathered: Gathered, groups: Groups) -> str:
    """`Largest ratio of weight noise …: SGD 0.05 as is, 0.1 recalibrated; RWP 0.2 as is, …`"""
    parts = []
    for index, group in groups.items():
        each = [result.borne for result in group]
        if not all(each):
            return ""
        means = [f"{shown(mean_std([b[way] for b in each])[0], 2)} {way}" for way in each[0]]
        parts.append(f"{gathered.rows[index].label} {', '.join(means)}")
    return f"{BORNE} (mean over runs): {'; '.join(parts)}."


def landscape_section(gathered: Gathered) -> Section | Absent:
    """A surface to turn and a map for each method, all on one scale."""
    surfaces = gathered.results("landscape")
    if not surfaces:
        return Absent("Landscapes", gathered.command("steppe analyze landscape"))
    heights = heights_of(list(surfaces.values()))
    views, maps = [], []
    for index, surface in surfaces.items():
        name = gathered.rows[index].label
        finite = surface.loss[surface.loss.isfinite()]
        top = f"up to {shown(float(finite.max()), 3)}" if len(finite) else "no finite point"
        words = f"{name}: loss {shown(surface.centre, 3)} at the centre, {top}"
        holes = f"; {surface.holes} points not finite, left empty" if surface.holes else ""
        label = f"Turnable surface of the loss. {words}{holes}. Arrow keys turn it."
        data = {
            "data_surface": json.dumps(grid_of(surface, heights), separators=(",", ":")),
            "data_low": shown(heights.low, 3),
            "data_high": shown(heights.high, 3),
        }
        canvas = {"tabindex": 0, "role": "img", "aria_label": label, "width": 480, "height": 380}
        views.append(captioned(tag("canvas", **canvas, **data), words + holes + "."))
        maps.append(captioned(landscape_map(name, surface, heights), name))
    buttons = zip("←→↑↓+−", ("left", "right", "up", "down", "in", "out"), strict=True)
    controls = "".join(
        tag("button", text(sign), type="button", data_turn=way,
            aria_label=f"{'Zoom' if sign in '+−' else 'Turn'} {way}")
        for sign, way in buttons
    )  # fmt: skip
    reset = tag("button", "Reset", type="button", data_turn="reset")
    kind = "logarithmic " if heights.log else ""
    hint = "Drag a surface, or focus it and use the arrow keys, + and −; all turn together."
    body = (
        tag("div", tag("div", controls, reset, class_="controls"), note(hint), class_="turning")
        + tag("div", *views, class_="grid views")
        + note(f"Height and colour are the loss, on one {kind}scale for all:")
        + scale_bar(heights)
        + tag("div", *maps, class_="grid maps")
        + note(origin_words(surfaces.values()))
    )
    return Section("landscapes", "Landscapes", body)


def spectrum_section(gathered: Gathered) -> Section | Absent:
    """The density of the Hessian's eigenvalues of each method, on common axes."""
    spectra = gathered.results("spectrum")
    if not spectra:
        return Absent("Spectra", gathered.command("steppe analyze spectrum"))
    peak = max(float(s.density.max()) for s in spectra.values())
    grids = [float(end) for s in spectra.values() for end in (s.grid[0], s.grid[-1])]
    x = charts.scale_for(grids, *charts.ACROSS, margin=0.02)
    y = charts.Scale(1e-7 * peak, 4 * peak, *charts.UPWARDS, log=True)
    drawn, rows = [], []
    for index, s in spectra.items():
        name = gathered.rows[index].label
        said = shown_within(s.largest, s.largest_residual)
        trace = f"{shown(s.trace)} ± {shown(s.trace_error, 2)}"
        points = list(zip(s.grid.tolist(), s.density.tolist(), strict=True))[::2]
        mark = (s.largest, f"λmax = {shown(s.largest, 3)}")
        labels = ("eigenvalue of the Hessian", "density")
        chart = charts.area_chart(points, index, x, y, mark, labels)
        drawn.append(captioned(chart, f"{name}: trace {trace}"))
        probes = f"{s.steps} × {s.probes}"
        rows.append((name, said, shown(s.smallest), trace, probes, str(s.origin["bn"])))
    header = ("method", "largest eigenvalue", "smallest", "trace ± error", "products", "BatchNorm")
    about = (
        "All on common axes: the narrower, the flatter. The density is smoothed and logarithmic. "
        + origin_words(spectra.values())
    )
    body = columns(drawn) + html_table(header, rows) + note(about)
    return Section("spectra", "Spectra of the Hessian", body)


def radius_section(gathered: Gathered) -> Section | Absent:
    """The loss against the perturbation's radius: one chart a kind, one line a method."""
    curves = gathered.results("radius")
    if not curves:
        return Absent("Radius curves", gathered.command("steppe analyze radius"))
    drawn = []
    for kind, words in KINDS.items():
        series = [line for i, c in curves.items() for line in _curve(c, kind, i, gathered)]
        if series:
            chart = line_chart(series, "radius ‖ε‖", "mean loss", log_x=True, log_y=True)
            drawn.append(captioned(chart, f"{words[0].upper()}{words[1:]}."))
    first = next(iter(curves.values()))
    about = (
        f"Bars: standard errors, over {first.directions} pairs of directions or over batches of "
        f"{first.batch}. Pale lines: second-order theory. {origin_words(curves.values())}"
    )
    body = legend(gathered, curves) + columns(drawn) + note(about)
    return Section("radius", "Loss against radius", body)


def _curve(curve: RadiusCurve, kind: str, index: int, gathered: Gathered) -> list[Series]:
    if kind not in curve.kinds:
        return []
    row = curve.kinds.index(kind)
    name, radii = gathered.rows[index].label, curve.radii.tolist()
    loss, theory = curve.loss[row].tolist(), curve.theory[row].tolist()
    line = Series(name, index, list(zip(radii, loss, strict=True)), curve.error[row].tolist())
    pale = Series(name, index, list(zip(radii, theory, strict=True)), theory=True)
    return [pale, line] if any(map(math.isfinite, theory)) else [line]


def sharpness_section(gathered: Gathered) -> Section | Absent:
    """m-sharpness as a table."""
    names = [name for name in gathered.analyses if name.startswith("sharpness")]
    found = {name: gathered.results(name) for name in names}
    if not found:
        return Absent("Sharpness", gathered.command("steppe analyze sharpness"))
    header, cells = ["method"], {index: [row.label] for index, row in enumerate(gathered.rows)}
    for values in found.values():
        s = next(iter(values.values()))
        scaled = ", adaptive" if s.adaptive else ""
        header.append(f"{s.case} rise, ρ {shown(s.rho)}, m {s.m}{scaled}")
        for index, row in cells.items():
            one = values.get(index)
            row.append("–" if one is None else f"{shown(one.value)} ± {shown(one.error, 2)}")
    every = [one for values in found.values() for one in values.values()]
    body = html_table(header, list(cells.values())) + note(origin_words(every))
    return Section("sharpness", "Sharpness", body)


def origin_words(results: Iterable[Result]) -> str:
    """On what they were measured, and a warning where that differs."""
    origins = [result.origin for result in results]
    said = " and ".join(
        dict.fromkeys(
            f"{o['samples']} samples without augmentation, {o['parameters']} weights, "
            f"BatchNorm mode {o['bn']}"
            for o in origins
        )
    )
    if len({(o["data_hash"], o["bn"], o["parameters"]) for o in origins}) == 1:
        return f"Measured on {said}."
    return (
        f"Not measured alike: on {said}, or on other samples. Do not compare; analyse again with "
        "the same settings."
    )
