"""The page's charts as inline SVG: coloured by the page's style sheet, so that they follow light,
dark and print; every series differs in mark and dash as well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from steppe.report.svg import STYLES, Scale, dash, marker, number, path, scale_for, shown, tag, text

WIDTH, HEIGHT = 480.0, 310.0
LEFT, RIGHT, TOP, BOTTOM = 68.0, 14.0, 14.0, 46.0
WIDE = 0.72
"""The width of a letter is about so much of its size; for judging what overlaps."""


@dataclass(frozen=True)
class Series:
    """A line: points (x, y), its number (which decides its style), perhaps errors of y."""

    name: str
    index: int
    points: Sequence[tuple[float, float]]
    errors: Sequence[float] | None = None
    theory: bool = False
    """Drawn as a pale line without marks."""


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    summary: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Lines with marks and error bars over common axes."""
    drawn = [s for s in series if not s.theory] or list(series)
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    x = scale_for(xs, LEFT, WIDTH - RIGHT, log=log_x, margin=0.03)
    y = scale_for(ys, HEIGHT - BOTTOM, TOP, log=log_y)
    lines = [_line(s, x, y) for s in series]
    return figure([axes(x, y, x_label, y_label), *lines], summary)


def _line(series: Series, x: Scale, y: Scale) -> str:
    inside = [(x(a), y(b)) if y.low <= b <= y.high else (x(a), math.nan) for a, b in series.points]
    kind = f"series s{series.index % STYLES}{' theory' if series.theory else ''}"
    line = tag("path", d=path(inside), class_="line", stroke_dasharray=dash(series.index))
    if series.theory:
        return tag("g", line, class_=kind, data_series=series.index)
    every = max(1, len(inside) // 8)
    marks = []
    for i, ((px, py), (a, b)) in enumerate(zip(inside, series.points, strict=True)):
        # Marks of different lines sit at different places, the last point always has one.
        wanted = i == len(inside) - 1 or i % every == series.index % every
        if not math.isfinite(py) or not wanted:
            continue
        error = series.errors[i] if series.errors else math.nan
        if math.isfinite(error) and error > 0:
            ends = (max(b - error, y.low), min(b + error, y.high))
            marks.append(tag("path", d=_bar(px, y(ends[0]), y(ends[1])), class_="whisker"))
        spread = f" ± {shown(error, 2)}" if math.isfinite(error) else ""
        title = f"{series.name}: {shown(b)}{spread} at {shown(a)}"
        marks.append(marker(px, py, series.index, title=title))
    return tag("g", line, *marks, class_=kind, data_series=series.index)


@dataclass(frozen=True)
class Interval:
    """A row of an interval chart: a mean, its interval, single values behind it, words after it."""

    name: str
    index: int
    mean: float
    low: float
    high: float
    values: Sequence[float] = ()
    words: str = ""
    hollow: bool = False


def interval_chart(
    rows: Sequence[Interval], x_label: str, summary: str, *, zero: bool = False
) -> str:
    """A row for each method: the name above, then mean, interval and the single seeds."""
    step = 46.0
    height = TOP + step * len(rows) + BOTTOM
    values = [v for r in rows for v in (r.mean, r.low, r.high, *r.values)] + [0.0] * zero
    x = scale_for(values, 14, WIDTH - RIGHT, margin=0.04)
    parts = [_x_axis(x, height - BOTTOM, TOP, x_label, height)]
    for i, row in enumerate(rows):
        top = TOP + step * i
        if zero:  # below the name, which it would cross
            at = {"x1": x(0), "x2": x(0), "y1": top + 19, "y2": top + step}
            parts.append(tag("line", **at, class_="zero"))
        parts.append(_interval(row, x, top + 14, top + 29))
    return figure(parts, summary, height=height)


def _interval(row: Interval, x: Scale, words_y: float, y: float) -> str:
    parts = [
        tag("text", text(row.name), x=14.0, y=words_y, class_="name"),
        tag("text", text(row.words), x=WIDTH - RIGHT, y=words_y, class_="words"),
    ]
    title = f"{row.name}: {row.words}"
    parts += [tag("circle", cx=x(v), cy=y + 9, r=2.4, class_="seed") for v in row.values]
    if math.isfinite(row.low) and math.isfinite(row.high):
        low, high = x(row.low), x(row.high)
        line = (
            f"M{number(low)} {y}H{number(high)}M{number(low)} {y - 5}v10M{number(high)} {y - 5}v10"
        )
        parts.append(tag("path", d=line, class_="whisker"))
    if math.isfinite(row.mean):
        hollow = "hollow" if row.hollow else None
        mark = marker(x(row.mean), y, row.index, size=5.5, title=title)
        parts.append(tag("g", mark, class_=hollow))
    return tag("g", *parts, class_=f"series s{row.index % STYLES}", data_series=row.index)


@dataclass(frozen=True)
class Spot:
    """A point of a scatter chart with its interval in y."""

    name: str
    index: int
    x: float
    y: float
    low: float
    high: float


def scatter_chart(spots: Sequence[Spot], x_label: str, y_label: str, summary: str) -> str:
    """Points with intervals; names are put where they cover nothing, or left to a legend."""
    finite = [s for s in spots if math.isfinite(s.x) and math.isfinite(s.y)]
    ys = [v for s in finite for v in (s.y, s.low, s.high)]
    x = scale_for([s.x for s in finite] + [0.9], LEFT, WIDTH - RIGHT, margin=0.14)
    y = scale_for(ys, HEIGHT - BOTTOM, TOP)
    taken = [(x(s.x) - 9, y(s.y) - 9, x(s.x) + 9, y(s.y) + 9) for s in finite]
    taken += [(x(s.x) - 5, y(s.high), x(s.x) + 5, y(s.low)) for s in finite if math.isfinite(s.low)]
    parts = [axes(x, y, x_label, y_label)]
    for spot in finite:
        px, py = x(spot.x), y(spot.y)
        inner = []
        if math.isfinite(spot.low) and math.isfinite(spot.high):
            inner.append(tag("path", d=_bar(px, y(spot.low), y(spot.high)), class_="whisker"))
        title = f"{spot.name}: {shown(spot.y)} at {shown(spot.x, 3)}"
        inner.append(marker(px, py, spot.index, size=5.5, title=title))
        if not needs_key(s.name for s in finite) and (at := _free_place(spot.name, px, py, taken)):
            place = {"x": at[0], "y": at[1], "text_anchor": at[2]}
            inner.append(tag("text", text(spot.name), **place, class_="name"))
        kind = f"series s{spot.index % STYLES}"
        parts.append(tag("g", *inner, class_=kind, data_series=spot.index))
    return figure(parts, summary)


def needs_key(names: Iterable[str]) -> bool:
    """Whether names are too long to stand beside their marks."""
    return any(len(name) > 14 for name in names)


def _free_place(
    name: str, x: float, y: float, taken: list[tuple[float, float, float, float]]
) -> tuple[float, float, str] | None:
    """Where a name overlaps no other name or mark; beside the mark if there is room.

    Judged by the letters of a phone's page, which are the largest. None: nowhere.
    """
    width = 15 * WIDE * len(name)
    for rise, (side, anchor) in product(
        (0, -16, 16, -32, 32, -48, 48), ((11.0, "start"), (-11.0, "end"))
    ):
        left = x + side if anchor == "start" else x + side - width
        box = (left, y + rise - 9, left + width, y + rise + 7)
        inside = (
            box[0] >= LEFT and box[2] <= WIDTH - 2 and box[1] >= 0 and box[3] <= HEIGHT - BOTTOM
        )
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            return x + side, y + rise + 4.5, anchor
    return None


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def area_chart(
    points: Sequence[tuple[float, float]],
    index: int,
    x: Scale,
    y: Scale,
    mark: tuple[float, str],
    labels: tuple[str, str],
    summary: str,
) -> str:
    """A filled curve with one marked place, on scales that several charts share."""
    line = [(x(a), y(max(b, y.low))) for a, b in points]
    floor = y(y.low)
    closed = (
        f"{path(line)}L{number(line[-1][0])} {number(floor)}L{number(line[0][0])} {number(floor)}Z"
    )
    at, words = mark
    anchor = "end" if x(at) > (LEFT + WIDTH) / 2 else "start"
    beside = x(at) + (-7 if anchor == "end" else 7)
    parts = [
        axes(x, y, *labels),
        tag(
            "g",
            tag("path", d=closed, class_="area"),
            tag("path", d=path(line), class_="line thin"),
            tag("line", x1=x(at), x2=x(at), y1=TOP, y2=floor, class_="place"),
            tag("path", d=f"M{number(x(at))} {TOP + 12}l-5 -9h10Z", class_="mark"),
            tag("text", text(words), x=beside, y=TOP + 12, text_anchor=anchor, class_="name"),
            class_=f"series s{index % STYLES}",
            data_series=index,
        ),
    ]
    return figure(parts, summary)


def figure(parts: Sequence[str], summary: str, *, height: float = HEIGHT) -> str:
    """The chart, with words for those who do not see it."""
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        role="img",
        aria_label=summary,
        class_="chart",
    )


def axes(x: Scale, y: Scale, x_label: str, y_label: str) -> str:
    """Grid, ticks and names of both axes."""
    parts = [_x_axis(x, HEIGHT - BOTTOM, TOP, x_label, HEIGHT)]
    for value in y.ticks():
        at = y(value)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", text(shown(value)), x=LEFT - 7, y=at + 4, class_="tick y"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        tag("text", text(y_label), transform=f"translate(13 {middle}) rotate(-90)", class_="label")
    )
    return "".join(parts)


def _x_axis(x: Scale, bottom: float, top: float, label: str, height: float) -> str:
    parts = [tag("line", x1=x.start, x2=x.end, y1=bottom, y2=bottom, class_="axis")]
    for value in x.ticks():
        at = x(value)
        parts.append(tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"))
        parts.append(tag("text", text(shown(value)), x=at, y=bottom + 17, class_="tick x"))
    middle = (x.start + x.end) / 2
    parts.append(tag("text", text(label), x=middle, y=height - 9, class_="label"))
    return "".join(parts)


def _bar(x: float, low: float, high: float) -> str:
    a, b = number(low), number(high)
    return f"M{number(x)} {a}V{b}M{number(x - 4)} {a}h8M{number(x - 4)} {b}h8"
