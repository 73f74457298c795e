"""Elements of the page's charts: escaped markup, scales with ticks, marks and dashes."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass

DASHES = ("", "7 4", "2 3", "9 3 2 3", "1 4", "12 4", "4 2 1 2 1 2")
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

    def value(self, at: float) -> float:
        """The way back."""
        part = (at - self.start) / (self.end - self.start)
        low, high = self._position(self.low), self._position(self.high)
        there = low + part * (high - low)
        return float(10**there) if self.log else there

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round values inside the range."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high, wanted)

    def _position(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def scale_for(
    values: Iterable[float], start: float, end: float, *, log: bool = False, margin: float = 0.05
) -> Scale:
    """A scale that holds all finite values, with a margin on both sides."""
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if log:
        low, high = (low, high) if high > low else (low / 2, high * 2)
        room = (high / low) ** margin
        return Scale(low / room, high * room, start, end, log=True)
    if high == low:
        low, high = low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05
    room = margin * (high - low)
    return Scale(low - room, high + room, start, end)


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    raw = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = last - first
    leads = (1, 2, 5) if decades <= 2 else (1,)
    step = max(1, -(-decades // 6))
    found = [lead * 10.0**e for e in range(first, last + 1, step) for lead in leads]
    return [value for value in found if low * 0.999 <= value <= high * 1.001]


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


def dash(index: int) -> str | None:
    """The dashes of the series with this number."""
    return DASHES[index % STYLES] or None


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
