"""What the methods gain over plain training: one table over all studies, one figure for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from steppe.lab.specs import label, parse
from steppe.lab.statistics import ENOUGH, Difference
from steppe.lab.tables import Table, signed
from steppe.report.canvas import COLOURS, panels, shared_legend
from studies.definitions import METHODS, Setting
from studies.findings import JUDGED, Findings
from studies.plan import Part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORT = {"defaults": "default", "tuned": "tuned"}
MARKS = {"defaults": ("o", "full"), "tuned": ("s", "none")}
NOTE = (
    "Points of test accuracy gained over plain training, means over seeds. **Bold**: told from zero "
    f"after Holm's correction over the study. Below {ENOUGH} pairs, which are then counted, nothing "
    "is told."
)


def gains_table(found: Sequence[Findings]) -> Table | None:
    """A row for each setting and kind of strengths, over all studies; None without any gain."""
    methods = METHODS[1:]
    rows = []
    for findings in found:
        for setting, part in itertools.product(findings.study.settings, JUDGED):
            gains = gains_of(findings, setting, part)
            if gains:
                mean = f"{findings.mean(setting, part, setting.plain):.2f}"
                cells = [_cell(gains.get(setting.called(method))) for method in methods]
                n = str(len(findings.finished(setting, part, setting.plain)))
                rows.append(
                    (f"`{findings.study.name}`: {setting.title}", SHORT[part], mean, *cells, n)
                )
    names = [label(parse(method), "sgd") for method in methods]
    header = ("study and setting", "strengths", "plain, %", *names, "n")
    return Table(header, tuple(rows), notes=(NOTE,)) if rows else None


def _cell(gain: Difference | None) -> str:
    if gain is None:
        return "–"
    if gain.n < ENOUGH:
        return f"{signed(gain.mean)} ({gain.n})"
    told = gain.verdict in ("better", "worse")
    return f"**{signed(gain.mean)}**" if told else signed(gain.mean)


def gains_figure(findings: Findings) -> Figure:
    """Every row of a study against plain training, with its interval; a panel for each setting."""
    rows = [(setting, gainers(findings, setting)) for setting in findings.study.settings]
    shown = [(setting, names) for setting, names in rows if names]
    most = max(len(names) for _, names in shown)
    figure, axes = panels(len(shown), width=4.6, height=0.27 * most + 0.9, columns=2)
    for axis, (setting, names) in zip(axes, shown, strict=True):
        _panel(axis, findings, setting, names)
    shared_legend(figure, axes)
    return figure


def _panel(axis: Any, findings: Findings, setting: Setting, names: list[str]) -> None:
    shown: list[Difference] = []
    for part, shift in zip(JUDGED, (-0.17, 0.17), strict=True):
        gains = gains_of(findings, setting, part)
        if not gains:
            continue
        means = [gain.mean for gain in gains.values()]
        halves = [gain.high - gain.mean for gain in gains.values()]
        mark, fill = MARKS[part]
        axis.errorbar(
            means,
            [names.index(name) + shift for name in gains],
            xerr=[half if math.isfinite(half) else 0.0 for half in halves],
            fmt=mark,
            fillstyle=fill,
            markersize=4.5,
            color=COLOURS[JUDGED.index(part)],
            capsize=2,
            label=f"{SHORT[part]} strengths",
        )
        shown += gains.values()
    # Beside others the interval of two or three pairs would leave no room for anything else.
    whole = [g for g in shown if g.n >= ENOUGH] or [g for g in shown if g.n > 1]
    reach = [0.0, *(g.mean for g in shown), *(end for g in whole for end in (g.low, g.high))]
    edge = 0.06 * (max(reach) - min(reach)) or 1.0
    axis.set_xlim(min(reach) - edge, max(reach) + edge)
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(names)), names, fontsize="small")
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel(f"points gained over {setting.plain}, n = {range_words([g.n for g in shown])}")
    axis.set_title(setting.title, fontsize="medium", wrap=True)


def range_words(counts: Sequence[int]) -> str:
    """The least and the most of them.

    >>> range_words([5, 3, 4]), range_words([20, 20]), range_words([])
    ('3 to 5', '20', '0')
    """
    ends = (min(counts, default=0), max(counts, default=0))
    return " to ".join(map(str, dict.fromkeys(ends)))


def gainers(findings: Findings, setting: Setting) -> list[str]:
    """All that can be compared with plain training, at either kind of strengths."""
    return list(dict.fromkeys(n for part in JUDGED for n in gains_of(findings, setting, part)))


def gains_of(findings: Findings, setting: Setting, part: Part) -> dict[str, Difference]:
    """By name every row that has pairs with plain training."""
    found = {}
    for name in findings.names(setting, part):
        _, gain = findings.difference(setting, part, (name, setting.plain))
        if gain is not None:
            found[name] = gain
    return found
