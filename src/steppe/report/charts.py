"""The page's charts as inline SVG: coloured by the page's style sheet, so that they follow light,
dark and print; every series differs in mark and dash as well."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

WIDTH, HEIGHT = 480.0, 310.0
LEFT, RIGHT, TOP, BOTTOM = 68.0, 14.0, 14.0, 46.0
ACROSS, UPWARDS = (LEFT, WIDTH - RIGHT), (HEIGHT - BOTTOM, TOP)
"""Where the two axes begin and end."""
DASHES = (None, "7 4", "2 3", "9 3 2 3", "1 4", "12 4", "4 2 1 2 1 2")
STYLES = len(DASHES)


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element; attributes are escaped, children are markup. `class_` and `stroke_width` are
    written as `class` and `stroke-width`; an attribute that is None is left out.

    >>> tag("text", text("a < b"), x=1.25, class_="tick")
    '<text x="1.25" class="tick">a &lt; b</text>'
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = number(value) if isinstance(value, float) else str(value)
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{html.escape(shown)}"')
    return f"<{' '.join(parts)}>{''.join(children)}</{name}>"


def text(words: object) -> str:
    """Words as markup."""
    return html.escape(str(words))


def number(value: float, digits: int = 2) -> str:
    """A coordinate, as short as it can be."""
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


def shown(value: float, figures: int = 4) -> str:
    """A number for people: a true minus, powers of ten where they are shorter.

    >>> shown(-0.25), shown(1e-7), shown(1234567.0)
    ('−0.25', '1e−7', '1.235e6')
    """
    if not math.isfinite(value):
        return "not finite"
    mantissa, _, power = f"{value:.{figures}g}".partition("e")
    words = f"{mantissa}e{int(power)}" if power else mantissa
    return words.replace("-", "−")


def shown_within(value: float, error: float) -> str:
    """A number with its error, where the error touches the four figures shown.

    >>> shown_within(1.019, 6e-31), shown_within(1.019, 0.02)
    ('1.019', '1.019 ± 0.02')
    """
    said = shown(value)
    return said if error <= 1e-4 * abs(value) else f"{said} ± {shown(error, 1)}"


def wide(values: Iterable[float]) -> bool:
    """Whether positive values span more than a factor of 20, and want a logarithmic scale."""
    finite = [v for v in values if math.isfinite(v)]
    return bool(finite) and min(finite) > 0 and max(finite) > 20 * min(finite)


@dataclass(frozen=True)
class Scale:
    """From values to coordinates, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (self._position(v) for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def value(self, part: float) -> float:
        """What lies at this part of the way."""
        low, high = self._position(self.low), self._position(self.high)
        there = low + part * (high - low)
        return float(10**there) if self.log else there

    def ticks(self) -> list[float]:
        """Round values inside the range."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            leads = (1, 2, 5) if last - first <= 2 else (1,)
            powers = range(first, last + 1, max(1, -(-(last - first) // 6)))
            found = [lead * 10.0**power for power in powers for lead in leads]
            return [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
        ends = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1
        return [round(i * step, 12) for i in range(*ends)]

    def _position(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def scale_for(
    values: Iterable[float], start: float, end: float, *, log: bool = False, margin: float = 0.05
) -> Scale:
    """A scale that holds all finite values, with a margin on both sides."""
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(finite), max(finite)) if finite else (0.1, 1.0)
    if high == low:
        room = 0.05 * (abs(low) or 1)
        low, high = (low / 2, high * 2) if log else (low - room, high + room)
    exact = Scale(low, high, start, end, log)
    return replace(exact, low=exact.value(-margin), high=exact.value(1 + margin))


def marker(x: float, y: float, index: int, title: str = "", size: float = 4.5) -> str:
    """The mark of the series with this number: shape and colour."""
    r, a, b = size, 0.42 * size, 1.35 * size
    cross = f"M{-a} {-b}H{a}V{-a}H{b}V{a}H{a}V{b}H{-a}V{a}H{-b}V{-a}H{-a}Z"
    shapes = (
        f"M{-r} 0A{r} {r} 0 1 0 {r} 0A{r} {r} 0 1 0 {-r} 0Z",
        f"M{-r} {-r}H{r}V{r}H{-r}Z",
        f"M0 {-1.25 * r}L{1.15 * r} {0.85 * r}H{-1.15 * r}Z",
        f"M0 {-b}L{b} 0L0 {b}L{-b} 0Z",
        f"M0 {1.25 * r}L{1.15 * r} {-0.85 * r}H{-1.15 * r}Z",
        cross,
        cross,
    )
    kind = index % STYLES
    turned = " rotate(45)" if kind == 5 else ""
    hover = [tag("title", text(title))] if title else []
    place = f"translate({number(x)} {number(y)}){turned}"
    return tag("path", *hover, d=shapes[kind], transform=place, class_="mark")


def path(points: Iterable[tuple[float, float]]) -> str:
    """The `d` of a line through points; it is broken where one is not finite."""
    words, down = [], False
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            down = False
            continue
        words.append(f"{'L' if down else 'M'}{number(x, 1)} {number(y, 1)}")
        down = True
    return "".join(words)


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
    *,
    log_x: bool = False,
    log_y: bool = False,
    whole: bool = False,
) -> str:
    """Lines with marks over common axes; error bars end at the frame, or fit it as a `whole`.

    `log_y` takes a logarithmic scale where the values span more than a factor of 20.
    """
    drawn = [s for s in series if not s.theory]
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    if whole:
        bars = [(y, e) for s in drawn for (_, y), e in zip(s.points, s.errors or (), strict=True)]
        ys += [end for y, e in bars for end in (y - e, y + e)]
    x = scale_for(xs, *ACROSS, log=log_x, margin=0.03)
    y = scale_for(ys, *UPWARDS, log=log_y and wide(ys))
    lines = [_line(s, x, y) for s in series]
    ends = "; ".join(f"{s.name} {_ends(s)}" for s in drawn)
    return figure([axes(x, y, x_label, y_label), *lines], f"{y_label} against {x_label}. {ends}")


def _ends(series: Series) -> str:
    """`0.97 at 8 to 0.61 at 2`; a series of one point has one end."""
    ends = [f"{shown(y)} at {shown(x)}" for x, y in (series.points[0], series.points[-1])]
    return " to ".join(dict.fromkeys(ends))


def key(index: int) -> tuple[str, str]:
    """A sample of the line with this number, and the class that colours it."""
    line = tag("path", d="M1 8H37", class_="line", stroke_dasharray=DASHES[index % STYLES])
    mark = marker(19, 8, index)
    return tag("svg", line, mark, viewBox="0 0 38 16", aria_hidden="true"), f"s{index % STYLES}"


def _line(series: Series, x: Scale, y: Scale) -> str:
    inside = [(x(a), y(b)) if y.low <= b <= y.high else (x(a), math.nan) for a, b in series.points]
    dash = DASHES[series.index % STYLES]
    parts = [tag("path", d=path(inside), class_="line", stroke_dasharray=dash)]
    every = max(1, len(inside) // 8)
    for i, ((px, py), (a, b)) in enumerate(zip(inside, series.points, strict=True)):
        # Marks of different lines sit at different places, the last point always has one.
        wanted = i == len(inside) - 1 or i % every == series.index % every
        if series.theory or not math.isfinite(py) or not wanted:
            continue
        error = series.errors[i] if series.errors else math.nan
        if math.isfinite(error) and error > 0:
            low, high = number(y(max(b - error, y.low))), number(y(min(b + error, y.high)))
            left = number(px - 4)
            bar = f"M{number(px)} {low}V{high}M{left} {low}h8M{left} {high}h8"
            parts.append(tag("path", d=bar, class_="whisker"))
        spread = f" ± {shown(error, 2)}" if math.isfinite(error) else ""
        title = f"{series.name}: {shown(b)}{spread} at {shown(a)}"
        parts.append(marker(px, py, series.index, title))
    return _group(series.index, parts, "theory" if series.theory else None)


def _group(index: int, parts: Iterable[str], kind: str | None = None) -> str:
    """What belongs to one series, in its colour."""
    kinds = filter(None, ["series", f"s{index % STYLES}", kind])
    return tag("g", *parts, class_=" ".join(kinds), data_series=index)


@dataclass(frozen=True)
class Interval:
    """A row of an interval chart: a mean, its interval, single values behind it, words after it."""

    name: str
    index: int
    mean: float
    low: float
    high: float
    words: str
    values: Sequence[float] = ()
    hollow: bool = False


def interval_chart(rows: Sequence[Interval], x_label: str, *, zero: bool = False) -> str:
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
    said = "; ".join(f"{row.name} {row.words}" for row in rows)
    return figure(parts, f"{x_label}. {said}", height=height)


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
    return _group(row.index, parts)


def area_chart(
    points: Sequence[tuple[float, float]],
    index: int,
    x: Scale,
    y: Scale,
    mark: tuple[float, str],
    labels: tuple[str, str],
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
    return figure(
        [axes(x, y, *labels), _group(index, drawn)], f"{labels[1]} against {labels[0]}: {words}"
    )


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
