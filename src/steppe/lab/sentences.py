"""What a comparison says: its table and its sentence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steppe.lab.naming import shown_name
from steppe.lab.statistics import ENOUGH, Difference, mean_std, mean_words
from steppe.lab.tables import Table, join_words, signed

if TYPE_CHECKING:
    from steppe.lab.comparison import Comparison, Row

HIGHER_IS_BETTER = {"accuracy": True, "nll": False, "ece": False, "rmse": False, "mae": False}
NAMES = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE %", "rmse": "RMSE", "mae": "MAE"}


def shown_metric(name: str) -> str:
    """A metric's name in a sentence, without its unit."""
    return NAMES.get(name, name).removesuffix(" %")


def comparison_table(comparison: Comparison) -> Table:
    """One row per method: the deciding metric, its difference from the baseline, the rest, the cost."""
    metric = comparison.example.metric
    header = (
        "method",
        "strength",
        _heading(metric, comparison),
        f"− {comparison.baseline.label.partition(' ')[0]} [interval]",
        "p (Holm)",
        "gap",
        *(_heading(name, comparison) for name in comparison.others),
        "time ×",
        "FLOPs ×",
        "n",
    )
    rows = tuple(_cells(row, comparison) for row in comparison.rows)
    example, seeds = comparison.example, len(comparison.seeds)
    note = f" ({example.data_note})" if example.data_note else ""
    title = f"{shown_name(example.config.data)}{note}, {shown_name(example.config.model)}, "
    title += (
        f"{example.steps} steps of batch {example.config.batch}, {seeds} seed{'s' * (seeds > 1)}"
    )
    return Table(header, rows, title, _notes(comparison))


def _heading(name: str, comparison: Comparison) -> str:
    """A metric's name with an arrow the way that is better, where that is known."""
    better = {comparison.example.metric: comparison.example.higher_is_better}
    arrows = {True: " ↑", False: " ↓", None: ""}
    return NAMES.get(name, name) + arrows[{**HIGHER_IS_BETTER, **better}.get(name)]


def _cells(row: Row, comparison: Comparison) -> tuple[str, ...]:
    metric = comparison.example.metric
    digits = metric_digits(comparison)
    form = f".{digits}f"
    gap, _ = mean_std(row.gaps())
    rest = (mean_std(row.values("test", name))[0] for name in comparison.others)
    return (
        row.label,
        row.strength or "–",
        mean_words(row.values("test", metric), form, form) if row.finished else "diverged",
        interval_words(row.difference, digits),
        "–" if row.difference is None else p_words(row.difference),
        signed(gap, digits).removeprefix("+") if row.finished else "–",
        *("–" if math.isnan(x) else f"{x:.3f}" if x < 1 else f"{x:.1f}" for x in rest),
        f"{row.cost['time']:.2f}" if "time" in row.cost else "–",
        f"{row.cost['flops']:.2f}",
        str(len(row.finished)),
    )


def metric_digits(comparison: Comparison) -> int:
    """Two for metrics in per cent; else enough for three figures of the baseline's spread."""
    if comparison.example.unit:
        return 2
    mean, _ = mean_std(comparison.baseline.values("test", comparison.example.metric))
    return max(0, 3 - math.floor(math.log10(abs(mean)))) if mean and math.isfinite(mean) else 4


def interval_words(difference: Difference | None, digits: int) -> str:
    """`+1.20 [+0.80, +1.60]`, at the level of Holm's test."""
    if difference is None or difference.n == 0:
        return "–"
    if difference.n < 2:
        return signed(difference.mean, digits)
    low, high = signed(difference.low, digits), signed(difference.high, digits)
    return f"{signed(difference.mean, digits)} [{low}, {high}]"


def p_words(difference: Difference) -> str:
    """The corrected p-value; none below five pairs."""
    if difference.n < ENOUGH:
        return "–"
    return "<0.001" if difference.p_holm < 0.001 else f"{difference.p_holm:.3f}"


def _notes(comparison: Comparison) -> tuple[str, ...]:
    lines = [sentence] if (sentence := comparison_sentence(comparison)) else []
    lines.append(
        "Final model, mean ± standard deviation over seeds; ↑ higher is better, ↓ lower is better. "
        "Differences are paired by seed, intervals and p-values Holm-corrected over all rows. Gap: "
        "how much better the metric is on training data. Time: training steps only, median over "
        "pairs of runs on equal machines."
    )
    tuned = [row for row in comparison.rows if row.trials]
    if tuned:
        trials = join_words([f"{row.label} {row.trials}" for row in tuned])
        lines.append(
            "Strengths were chosen on a validation split of the training data, with other seeds "
            f"(runs: {trials})."
        )
    elif any(row.chosen == "default" for row in comparison.rows):
        lines.append("Strengths that were not given are untuned defaults (--tune chooses them).")
    known = defaultdict(lambda: None, comparison.example.environment)
    ranks = known["ranks"] or 1
    lines.append(
        f"torch {known['torch']}, steppe {known['steppe']} ({known['commit'] or 'installed'}), "
        f"{known['processor']}, {known['threads']} thread{'s' * (known['threads'] != 1)} per run"
        f"{f', on each of {ranks} ranks' if ranks > 1 else ''}."
    )
    return tuple(lines)


def verdict_words(rows: Sequence[tuple[Row, Difference]], digits: int) -> list[str]:
    """`SAM (+9.21) and RWP (+6.90) are better`, `ASAM (−1.20) is worse`."""
    said = []
    for verdict in ("better", "worse"):
        named = [f"{r.label} ({signed(d.mean, digits)})" for r, d in rows if d.verdict == verdict]
        if named:
            said.append(f"{join_words(named)} {'is' if len(named) == 1 else 'are'} {verdict}")
    return said


def comparison_sentence(comparison: Comparison) -> str:
    """`Over 10 seeds, SAM (+9.21) and RWP (+6.90) are better than SGD in test accuracy; …`"""
    example, base = comparison.example, comparison.baseline.label
    digits = metric_digits(comparison)
    unit = f" {example.unit}" if example.unit else ""
    rows = [(row, row.difference) for row in comparison.rows[1:] if row.difference is not None]
    parts = [f"{words} than {base}" for words in verdict_words(rows, digits)]
    if unclear := [(row, d) for row, d in rows if d.verdict == "no difference seen"]:
        parts.append(
            f"no significant difference from {base} for {join_words([r.label for r, _ in unclear])} "
            f"(minimum detectable difference {max(d.smallest for _, d in unclear):.{digits}f}{unit})"
        )
    n = len(comparison.seeds)
    said = ""
    if parts:
        said = f"Over {n} seed{'s' * (n > 1)}, in test {shown_metric(example.metric)}"
        said += f"{f' ({example.unit})' if unit else ''}: {'; '.join(parts)}."
    few = [(r, d) for r, d in rows if d.verdict == "too few seeds" and r.finished]
    return " ".join(filter(None, [said, _too_few(few, digits, unit), _diverged(comparison)]))


def _too_few(rows: Sequence[tuple[Row, Difference]], digits: int, unit: str) -> str:
    if not rows:
        return ""
    n = min(difference.n for _, difference in rows)
    seeds = "1 seed is" if n == 1 else f"{n} seeds are"
    names = join_words([row.label for row, _ in rows])
    text = f"{seeds} too few for a verdict on {names} ({ENOUGH} are needed)"
    if n >= 2:
        most, difference = max(rows, key=lambda pair: abs(pair[1].mean))
        least = max(each.smallest for _, each in rows)
        text += (
            f": the largest difference is {signed(difference.mean, digits)}{unit} "
            f"({most.label}), the minimum detectable difference {least:.{digits}f}"
        )
    return text + "."


def _diverged(comparison: Comparison) -> str:
    lost = [
        f"{row.label} in {len(row.results) - len(row.finished)} of {len(row.results)} seeds"
        for row in comparison.rows
        if len(row.finished) < len(row.results)
    ]
    return f"Diverged: {join_words(lost)}." if lost else ""
