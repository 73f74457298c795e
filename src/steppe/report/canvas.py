"""Blank figures: panels, colours, and writing to files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from steppe.lab.naming import library

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

# Okabe & Ito (2008), in the order in which they are easiest to tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#56B4E9")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 2)), (0, (7, 2)))
MARKS = "osd^vP*"
SURFACE = "viridis"


def panels(
    count: int,
    *,
    width: float = 3.6,
    height: float | None = None,
    columns: int = 3,
    share: bool = False,
) -> tuple[Figure, list[Any]]:
    """A figure with `count` axes, at most `columns` beside each other."""
    across = min(count, columns)
    down = -(-count // across)
    # A figure of its own, not pyplot's: nothing global, no window, no need to close it.
    size = (width * across + 1, (height or 0.85 * width) * down + 0.6)
    figure: Figure = library("matplotlib.figure", "'steppe[report]'").Figure(
        figsize=size, layout="constrained"
    )
    grid = figure.subplots(down, across, squeeze=False, sharex=share, sharey=share)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def shared_legend(figure: Figure, axes: Sequence[Any], columns: int | None = None) -> None:
    """One legend above all panels, of everything that any of them names, in one line by default."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    figure.legend(found.values(), found, loc="outside upper center", ncols=columns or len(found))


def line_style(index: int) -> dict[str, Any]:
    """Colour and dash of the line with this number: each can be recognised by either."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def marked_style(index: int) -> dict[str, Any]:
    """The same with a mark."""
    return {**line_style(index), "marker": MARKS[index % len(MARKS)]}


def error_bars(
    axis: Any, index: int, x: Any, y: Any, errors: Any, label: str, **style: Any
) -> None:
    """The line with this number, with marks and bars."""
    bars = {"yerr": errors, "markersize": 4, "capsize": 2, "label": label or None}
    axis.errorbar(x, y, **{**marked_style(index), **bars, **style})


def plain_ticks(axis: Any) -> None:
    """Write 0.6, not 6 x 10^-1, on a logarithmic axis of few decades."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def _num_to_string(self, x: float, vmin: float, vmax: float) -> str:
            return f"{x:g}"

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(minor_thresholds=(2, 0.5)))


def named(results: T | Mapping[str, T]) -> dict[str, T]:
    """Results by name; a bare one has no name."""
    by_name: dict[str, T] = dict(results) if isinstance(results, Mapping) else {"": results}
    if not by_name:
        raise ValueError("There is nothing to draw: no result was given.")
    return by_name


def save_figure(
    figure: Figure, path: str | os.PathLike[str], formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Write the figure once a format, beside each other: `path` with its ending replaced."""
    stem = Path(path)
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for ending in formats:
        target = stem.with_name(f"{stem.stem if stem.suffix else stem.name}.{ending}")
        # No dates inside: the same result gives the same file.
        figure.savefig(target, dpi=150, metadata={"Date": None} if ending == "svg" else None)
        written.append(target)
    return written
