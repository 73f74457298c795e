"""The page's charts as inline SVG: coloured by the page's style sheet, so that they follow light,
dark and print; every series differs in mark and dash as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steppe.report.svg import STYLES, Scale, dash, marker, number, path, scale_for, shown, tag, text

WIDTH, HEIGHT = 480.0, 310.0
LEFT, RIGHT, TOP, BOTTOM = 68.0, 14.0, 14.0, 46.0


@dataclass(frozen=True)
class Series:
    """A line or a mark: points (x, y), its number (which decides its style), perhaps errors of y."""

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
    whole: bool = False,
) -> str:
    """Lines with marks over common axes; error bars end at the frame, or fit it as a `whole`."""
    drawn = [s for s in series if not s.theory] or list(series)
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    if whole:
        bars = [(y, e) for s in drawn for (_, y), e in zip(s.points, s.errors or (), strict=True)]
        ys += [end for y, e in bars for end in (y - e, y + e)]
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
        marks.append(
            marker(px, py, series.index, f"{series.name}: {shown(b)}{spread} at {shown(a)}")
        )
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
    parts += [tag("circle", cx=x(v), cy=y + 9, r=2.4, class_="seed") for v in row.values]
    if math.isfinite(row.low) and math.isfinite(row.high):
        low, high = x(row.low), x(row.high)
        line = f"M{number(low)} {y}H{number(high)}" + "".join(
            f"M{number(end)} {y - 5}v10" for end in (low, high)
        )
        parts.append(tag("path", d=line, class_="whisker"))
    if math.isfinite(row.mean):
        mark = marker(x(row.mean), y, row.index, f"{row.name}: {row.words}", size=5.5)
        parts.append(tag("g", mark, class_="hollow" if row.hollow else None))
    return tag("g", *parts, class_=f"series s{row.index % STYLES}", data_series=row.index)


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
    line = path((x(a), y(max(b, y.low))) for a, b in points)
    at, words = x(mark[0]), mark[1]
    side, anchor = (-7, "end") if at > (LEFT + WIDTH) / 2 else (7, "start")
    drawn = (
        tag("path", d=f"{line}V{y.start}H{number(x(points[0][0]))}Z", class_="area"),
        tag("path", d=line, class_="line thin"),
        tag("line", x1=at, x2=at, y1=TOP, y2=y.start, class_="place"),
        tag("path", d=f"M{number(at)} {TOP + 12}l-5 -9h10Z", class_="mark"),
        tag("text", text(words), x=at + side, y=TOP + 12, text_anchor=anchor, class_="name"),
    )
    group = tag("g", *drawn, class_=f"series s{index % STYLES}", data_series=index)
    return figure([axes(x, y, *labels), group], summary)


def figure(parts: Sequence[str], summary: str, *, height: float = HEIGHT) -> str:
    """The chart, with words for those who do not see it."""
    box = f"0 0 {number(WIDTH)} {number(height)}"
    return tag("svg", *parts, viewBox=box, role="img", aria_label=summary, class_="chart")


def axes(x: Scale, y: Scale, x_label: str, y_label: str) -> str:
    """Grid, ticks and names of both axes."""
    parts = [_x_axis(x, HEIGHT - BOTTOM, TOP, x_label, HEIGHT)]
    for value in y.ticks():
        at = y(value)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", text(shown(value)), x=LEFT - 7, y=at + 4, class_="tick y"))
    turned = f"translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"
    return "".join(parts) + tag("text", text(y_label), transform=turned, class_="label")


def _x_axis(x: Scale, bottom: float, top: float, label: str, height: float) -> str:
    parts = [tag("line", x1=x.start, x2=x.end, y1=bottom, y2=bottom, class_="axis")]
    for value in x.ticks():
        at = x(value)
        parts.append(tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"))
        parts.append(tag("text", text(shown(value)), x=at, y=bottom + 17, class_="tick x"))
    middle = (x.start + x.end) / 2
    return "".join(parts) + tag("text", text(label), x=middle, y=height - 9, class_="label")


def _bar(x: float, low: float, high: float) -> str:
    a, b = number(low), number(high)
    return f"M{number(x)} {a}V{b}M{number(x - 4)} {a}h8M{number(x - 4)} {b}h8"
