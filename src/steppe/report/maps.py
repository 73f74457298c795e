"""Landscapes for the page: one scale for all, maps with contour lines, data for the 3-D view."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from steppe.analysis import Landscape
from steppe.report.svg import Scale, number, shown, tag, text

# Viridis at sixteen even places: even steps look even, with and without full colour vision.
PALETTE = (
    *("440154", "481a6c", "472f7d", "414487", "39568c", "31688e", "2a788e", "23888e"),
    *("1f988b", "22a884", "35b779", "54c568", "7ad151", "a5db36", "d2e21b", "fde725"),
)
LEVELS = 9
SIZE, MARGIN = 300.0, 44.0


@dataclass(frozen=True)
class Heights:
    """From a loss to its place between 0 and 1, on the scale that all landscapes share.

    Logarithmic where the losses span more than a factor of 20.
    """

    low: float
    high: float
    log: bool

    def __call__(self, loss: float) -> float | None:
        """None where the loss is not finite."""
        if not math.isfinite(loss):
            return None
        return Scale(self.low, self.high, 0.0, 1.0, log=self.log)(loss)

    def loss(self, height: float) -> float:
        """The way back."""
        if self.log:
            return float(self.low * (self.high / self.low) ** height)
        return self.low + (self.high - self.low) * height


def heights_of(surfaces: Sequence[Landscape]) -> Heights:
    """The common scale of several landscapes."""
    finite = [float(v) for s in surfaces for v in s.loss[s.loss.isfinite()]]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    log = low > 0 and high > 20 * low
    return Heights(low, high if high > low else low + 1e-12, log)


def colour(height: float) -> tuple[int, int, int]:
    """The colour of a height between 0 and 1."""
    place = min(max(height, 0.0), 1.0) * (len(PALETTE) - 1)
    i = min(int(place), len(PALETTE) - 2)
    first, second = (bytes.fromhex(PALETTE[k]) for k in (i, i + 1))
    mixed = [round(a + (b - a) * (place - i)) for a, b in zip(first, second, strict=True)]
    return mixed[0], mixed[1], mixed[2]


def grid_of(surface: Landscape, heights: Heights) -> list[list[float | None]]:
    """Heights row by row, rounded: what the 3-D view draws."""
    rows = surface.loss.tolist()
    placed = [[heights(loss) for loss in row] for row in rows]
    return [[None if h is None else round(h, 4) for h in row] for row in placed]


def landscape_map(name: str, surface: Landscape, heights: Heights) -> str:
    """A map: colour and contour lines of equal loss, a cross at the trained weights."""
    grid = grid_of(surface, heights)[::-1]  # a grows upwards
    far = float(surface.a[-1])
    n = len(grid)
    place = Scale(0, n - 1, MARGIN + SIZE / n / 2, MARGIN + SIZE - SIZE / n / 2)
    lines = []
    for level in range(1, LEVELS + 1):
        d = contour(grid, level / (LEVELS + 1), place)
        if d:
            title = tag("title", text(f"loss {shown(heights.loss(level / (LEVELS + 1)), 3)}"))
            lines.append(tag("path", title, d=d, class_="contour"))
    centre = MARGIN + SIZE / 2
    cross = f"M{centre - 7} {centre}h14M{centre} {centre - 7}v14"
    parts = [
        tag("rect", x=MARGIN, y=MARGIN, width=SIZE, height=SIZE, class_="holes"),
        tag(
            "image",
            href=_png(grid),
            x=MARGIN,
            y=MARGIN,
            width=SIZE,
            height=SIZE,
            preserveAspectRatio="none",
            class_="cells",
        ),
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
        shown_value = shown(value, 3)
        words.append(tag("text", text(shown_value), x=at, y=end + 16, class_="tick x"))
        up = 2 * middle - at
        words.append(tag("text", text(shown_value), x=MARGIN - 6, y=up + 4, class_="tick y"))
    words.append(tag("text", text("along d₂"), x=middle, y=end + 34, class_="label"))
    turned = f"translate(11 {middle}) rotate(-90)"
    words.append(tag("text", text("along d₁"), transform=turned, class_="label"))
    return words


def contour(grid: list[list[float | None]], level: float, place: Scale) -> str:
    """The `d` of the lines where the grid crosses a level (marching squares); holes have none."""
    words = []
    for i in range(len(grid) - 1):
        for j in range(len(grid[0]) - 1):
            corners = (grid[i][j], grid[i][j + 1], grid[i + 1][j + 1], grid[i + 1][j])
            known = [value for value in corners if value is not None]
            if len(known) < 4 or not min(known) < level <= max(known):
                continue
            ends = _crossings(known, level)
            for (x1, y1), (x2, y2) in zip(ends[::2], ends[1::2], strict=False):
                start = f"M{number(place(j + x1), 1)} {number(place(i + y1), 1)}"
                words.append(f"{start}L{number(place(j + x2), 1)} {number(place(i + y2), 1)}")
    return "".join(words)


def _crossings(corners: list[float], level: float) -> list[tuple[float, float]]:
    """Where the edges of a unit square cross the level, going around from the upper left."""
    around = ((0, 0), (1, 0), (1, 1), (0, 1))
    found = []
    for k in range(4):
        first, second = corners[k], corners[(k + 1) % 4]
        if (first < level) != (second < level):
            t = (level - first) / (second - first)
            (x1, y1), (x2, y2) = around[k], around[(k + 1) % 4]
            found.append((x1 + t * (x2 - x1), y1 + t * (y2 - y1)))
    return found


def scale_bar(heights: Heights) -> str:
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
    from PIL import Image

    image = Image.new("RGBA", (len(grid[0]), len(grid)))
    image.putdata([(0, 0, 0, 0) if h is None else (*colour(h), 255) for row in grid for h in row])
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
