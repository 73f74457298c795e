"""Landscapes for the page: one scale for all, maps with contour lines, data for the 3-D view."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence

from steppe.analysis import Landscape
from steppe.report.charts import Scale, number, path, shown, tag, text, wide

# Viridis at sixteen even places: even steps look even, with and without full colour vision.
PALETTE = (
    *("440154", "481a6c", "472f7d", "414487", "39568c", "31688e", "2a788e", "23888e"),
    *("1f988b", "22a884", "35b779", "54c568", "7ad151", "a5db36", "d2e21b", "fde725"),
)
LEVELS = 9
SIZE, MARGIN = 300.0, 44.0


def heights_of(surfaces: Sequence[Landscape]) -> Scale:
    """From a loss to its height between 0 and 1, on the scale that all landscapes share.

    Logarithmic where the losses span more than a factor of 20.
    """
    finite = [float(v) for s in surfaces for v in s.loss[s.loss.isfinite()]]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    return Scale(low, high if high > low else low + 1e-12, 0.0, 1.0, log=wide(finite))


def grid_of(surface: Landscape, heights: Scale) -> list[list[float | None]]:
    """Heights row by row, rounded, None where a loss is not finite: what the 3-D view draws."""
    return [
        [round(heights(loss), 4) if math.isfinite(loss) else None for loss in row]
        for row in surface.loss.tolist()
    ]


def landscape_map(name: str, surface: Landscape, heights: Scale) -> str:
    """A map: colour and contour lines of equal loss, a cross at the trained weights."""
    grid = grid_of(surface, heights)[::-1]  # a grows upwards
    far = float(surface.a[-1])
    n = len(grid)
    place = Scale(0, n - 1, MARGIN + SIZE / n / 2, MARGIN + SIZE - SIZE / n / 2)
    lines = []
    for height in (level / (LEVELS + 1) for level in range(1, LEVELS + 1)):
        if d := contour(grid, height, place):
            title = tag("title", text(f"loss {shown(heights.value(height), 3)}"))
            lines.append(tag("path", title, d=d, class_="contour"))
    centre = MARGIN + SIZE / 2
    cross = f"M{centre - 7} {centre}h14M{centre} {centre - 7}v14"
    square = {"x": MARGIN, "y": MARGIN, "width": SIZE, "height": SIZE}
    parts = [
        tag("rect", **square, class_="holes"),
        tag("image", href=_png(grid), **square, preserveAspectRatio="none", class_="cells"),
        *lines,
        tag("path", d=cross, class_="centre outer"),
        tag("path", d=cross, class_="centre"),
        *_edges(far),
    ]
    box = f"0 {number(MARGIN - 8)} {number(SIZE + MARGIN + 12)} {number(SIZE + MARGIN + 8)}"
    summary = (
        f"Map of the loss around the weights of {name}: {shown(surface.centre, 3)} at the centre, "
        f"shared colour scale from {shown(heights.low, 3)} to {shown(heights.high, 3)}."
    )
    return tag("svg", *parts, viewBox=box, role="img", aria_label=summary, class_="map")


def _edges(far: float) -> list[str]:
    end, middle = MARGIN + SIZE, MARGIN + SIZE / 2
    words = []
    for at, value in ((MARGIN, -far), (middle, 0.0), (end, far)):
        said, up = text(shown(value, 3)), 2 * middle - at + 4
        words.append(tag("text", said, x=at, y=end + 16, class_="tick x"))
        words.append(tag("text", said, x=MARGIN - 6, y=up, class_="tick y"))
    turned = f"translate(11 {middle}) rotate(-90)"
    across = tag("text", text("along d₂"), x=middle, y=end + 34, class_="label")
    return [*words, across, tag("text", text("along d₁"), transform=turned, class_="label")]


def contour(grid: list[list[float | None]], level: float, place: Scale) -> str:
    """The `d` of the lines where the grid crosses a level; holes have none."""
    import numpy as np
    from contourpy import contour_generator

    heights = np.ma.masked_invalid(np.array(grid, dtype=float))  # None is a NaN there
    lines = contour_generator(z=heights).lines(level)
    return "".join(path((place(x), place(y)) for x, y in np.asarray(line)) for line in lines)


def scale_bar(heights: Scale) -> str:
    """The common colour scale with its losses."""
    stops = "".join(
        tag("stop", offset=f"{100 * i / (len(PALETTE) - 1):.1f}%", stop_color=f"#{value}")
        for i, value in enumerate(PALETTE)
    )
    parts = [
        tag("defs", tag("linearGradient", stops, id="palette")),
        tag("rect", x=20, y=4, width=400, height=14, fill="url(#palette)"),
    ]
    place = Scale(heights.low, heights.high, 20, 420, log=heights.log)
    for value in place.ticks():
        parts.append(tag("line", x1=place(value), x2=place(value), y1=18, y2=22, class_="axis"))
        parts.append(tag("text", text(shown(value, 3)), x=place(value), y=35, class_="tick x"))
    kind = "logarithmic" if heights.log else "linear"
    summary = (
        f"Colour scale of the loss, {kind}, {shown(heights.low, 3)} to {shown(heights.high, 3)}"
    )
    return tag("svg", *parts, viewBox="0 0 440 42", role="img", aria_label=summary, class_="scale")


def _png(grid: list[list[float | None]]) -> str:
    """The heights as a tiny picture, one pixel a point, transparent where there is none."""
    import numpy as np
    from PIL import Image

    heights = np.array(grid, dtype=float)
    palette = np.array([list(bytes.fromhex(value)) for value in PALETTE]).T
    places = np.linspace(0, 1, len(PALETTE))
    parts = [np.interp(np.nan_to_num(heights), places, channel) for channel in palette]
    pixels = np.stack([*parts, 255.0 * np.isfinite(heights)], axis=-1).round().astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
