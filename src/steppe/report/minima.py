"""The sections of the page about the minima: landscapes, spectra, radius curves, sharpness."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from steppe.analysis import Landscape, RadiusCurve, Result, Sharpness, Spectrum
from steppe.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    area_chart,
    line_chart,
)
from steppe.report.gathered import Gathered
from steppe.report.maps import PALETTE, grid_of, heights_of, landscape_map, scale_bar
from steppe.report.sections import (
    Absent,
    Section,
    captioned,
    columns,
    html_table,
    legend,
    value_range,
)
from steppe.report.svg import Scale, scale_for, shown, shown_within, tag, text

KINDS = {
    "random": "random directions",
    "sam": "adversarial, one step",
    "pgd": "adversarial, ascent",
}


def landscape_section(gathered: Gathered) -> Section | Absent:
    """A surface to turn and a map for each method, all on one scale."""
    surfaces = _of(gathered, "landscape", Landscape)
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
        canvas = tag("canvas", tabindex=0, role="img", aria_label=label, data_surface=index,
                     width=480, height=380)  # fmt: skip
        views.append(captioned(canvas, words + holes + "."))
        maps.append(captioned(landscape_map(name, surface, heights), name))
    buttons = (("left", "←"), ("right", "→"), ("up", "↑"), ("down", "↓"), ("in", "+"), ("out", "−"))
    names = {"in": "Zoom in", "out": "Zoom out"}
    controls = "".join(
        tag("button", text(sign), type="button", data_turn=way,
            aria_label=names.get(way, f"Turn {way}"))
        for way, sign in buttons
    )  # fmt: skip
    reset = tag("button", "Reset", type="button", data_turn="reset")
    hint = "Drag a surface, or focus it and use the arrow keys, + and −; all turn together."
    body = (
        tag("div", tag("div", controls, reset, class_="controls"), tag("p", text(hint), class_="note"),
            class_="turning")
        + tag("div", *views, class_="grid views")
        + tag("p", text("Height and colour are the loss, on one "
              f"{'logarithmic ' if heights.log else ''}scale for all:"), class_="note")
        + scale_bar(heights)
        + tag("div", *maps, class_="grid maps")
        + tag("p", text(origin_words(surfaces.values())), class_="note")
    )  # fmt: skip
    return Section("landscapes", "Landscapes", body)


def surface_data(gathered: Gathered) -> dict[str, Any]:
    """What the 3-D view needs, for JSON."""
    surfaces = _of(gathered, "landscape", Landscape)
    if not surfaces:
        return {}
    heights = heights_of(list(surfaces.values()))
    return {
        "colours": [f"#{value}" for value in PALETTE],
        "surfaces": {
            str(index): {
                "heights": grid_of(surface, heights),
                "span": float(surface.a[-1]),
                "low": shown(heights.low, 3),
                "high": shown(heights.high, 3),
            }
            for index, surface in surfaces.items()
        },
    }


def spectrum_section(gathered: Gathered) -> Section | Absent:
    """The density of the Hessian's eigenvalues of each method, on common axes."""
    spectra = _of(gathered, "spectrum", Spectrum)
    if not spectra:
        return Absent("Spectra", gathered.command("steppe analyze spectrum"))
    peak = max(float(s.density.max()) for s in spectra.values())
    grids = [float(end) for s in spectra.values() for end in (s.grid[0], s.grid[-1])]
    x = scale_for(grids, LEFT, WIDTH - RIGHT, margin=0.02)
    y = Scale(1e-7 * peak, 4 * peak, HEIGHT - BOTTOM, TOP, log=True)
    charts, rows = [], []
    for index, s in spectra.items():
        name = gathered.rows[index].label
        largest = f"λmax = {shown(s.largest, 3)}"
        said = shown_within(s.largest, s.largest_residual)
        trace = f"{shown(s.trace)} ± {shown(s.trace_error, 2)}"
        points = list(zip(s.grid.tolist(), s.density.tolist(), strict=True))
        labels = ("eigenvalue of the Hessian", "density")
        summary = f"Spectrum of {name}: largest eigenvalue {said}, trace {trace}."
        chart = area_chart(points[::2], index, x, y, (s.largest, largest), labels, summary)
        charts.append(captioned(chart, f"{name}: trace {trace}"))
        negative = shown(s.smallest)
        probes = f"{s.steps} × {s.probes}"
        rows.append((name, said, negative, trace, probes, str(s.origin["bn"])))
    header = ("method", "largest eigenvalue", "smallest", "trace ± error", "products", "BatchNorm")
    about = (
        "All on common axes: the narrower, the flatter. The density is smoothed and logarithmic. "
        + origin_words(spectra.values())
    )
    body = columns(charts) + html_table(header, rows) + tag("p", text(about), class_="note")
    return Section("spectra", "Spectra of the Hessian", body)


def radius_section(gathered: Gathered) -> Section | Absent:
    """The loss against the perturbation's radius: one chart a kind, one line a method."""
    curves = _of(gathered, "radius", RadiusCurve)
    if not curves:
        return Absent("Radius curves", gathered.command("steppe analyze radius"))
    charts = []
    for kind, words in KINDS.items():
        series = [line for i, c in curves.items() for line in _curve(c, kind, i, gathered)]
        drawn = [s for s in series if not s.theory]
        if drawn:
            said = "; ".join(f"{s.name} {shown(s.points[-1][1], 3)}" for s in drawn)
            summary = f"Loss against radius, {words}. At the largest radius: {said}"
            low, high = value_range(drawn)
            log = low > 0 and high > 20 * low
            chart = line_chart(series, "radius ‖ε‖", "mean loss", summary, log_x=True, log_y=log)
            charts.append(captioned(chart, f"{words[0].upper()}{words[1:]}."))
    first = next(iter(curves.values()))
    about = (
        f"Bars: standard errors, over {first.directions} pairs of directions or over batches of "
        f"{first.batch}. Pale lines: second-order theory. {origin_words(curves.values())}"
    )
    named = [Series(gathered.rows[i].label, i, ()) for i in curves]
    body = legend(named) + columns(charts) + tag("p", text(about), class_="note")
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
    found = {
        name: _of(gathered, name, Sharpness)
        for name in gathered.analyses
        if name.startswith("sharpness")
    }
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
    body = html_table(header, list(cells.values())) + tag(
        "p", text(origin_words(every)), class_="note"
    )
    return Section("sharpness", "Sharpness", body)


def _of(gathered: Gathered, name: str, kind: type[Any]) -> dict[int, Any]:
    return {row: r for row, r in gathered.results(name).items() if isinstance(r, kind)}


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
