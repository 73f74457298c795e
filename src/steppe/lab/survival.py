"""What a comparison says about compression: paired differences, a table, a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steppe.lab.compression import CHANGES, RECALIBRATION, name_of
from steppe.lab.sentences import interval_words, metric_digits
from steppe.lab.specs import LARGE
from steppe.lab.statistics import ENOUGH, Difference, compare_all, mean_std
from steppe.lab.tables import Table, join_words, signed

if TYPE_CHECKING:
    from steppe.lab.comparison import Comparison, Row
    from steppe.lab.results import Result

UNCHANGED = "none"
RANDOM = ("rwp", "arwp", "m-rwp", "m-arwp")


@dataclass(frozen=True)
class Cell:
    """One method after one change, with one way of BatchNorm's statistics."""

    row: Row
    change: str
    statistics: str
    values: tuple[float, ...]
    difference: Difference | None
    """To the baseline after the same change; None for the baseline and the unchanged model."""


def survival_cells(comparison: Comparison) -> list[Cell]:
    """Every method after every change, differences corrected by Holm over all of them.

    Empty where some finished run was not measured.
    """
    runs = [result for row in comparison.rows for result in row.finished]
    if not runs or not all(result.compressed for result in runs):
        return []
    kinds = [
        (statistics, change)
        for statistics in runs[0].compressed
        for change in (UNCHANGED, *map(name_of, CHANGES))
    ]
    asked = [(r, *k) for k in kinds if k[1] != UNCHANGED for r in comparison.rows[1:]]
    base = comparison.baseline
    differences = compare_all(
        [_paired(row, base, statistics, change) for row, statistics, change in asked],
        higher_is_better=comparison.example.higher_is_better,
    )
    known = {(r.spec, s, c): d for (r, s, c), d in zip(asked, differences, strict=True)}
    return [
        Cell(
            row,
            change,
            statistics,
            tuple(_value(result, statistics, change) for result in row.finished),
            known.get((row.spec, statistics, change)),
        )
        for statistics, change in kinds
        for row in comparison.rows
    ]


def survival_table(comparison: Comparison) -> Table | None:
    """One row per method: the deciding metric after each change and its difference to the baseline.

    None where it was not measured.
    """
    cells = survival_cells(comparison)
    if not cells:
        return None
    digits = _digits(comparison)
    ways = list(dict.fromkeys(cell.statistics for cell in cells))
    several = len(ways) > 1
    short = [name_of(change).partition(",")[0] for change in CHANGES]
    header = ("method", *(["BatchNorm"] if several else []), "unchanged", *short)
    rows = []
    for row in comparison.rows:
        for way in ways:
            mine = [cell for cell in cells if cell.row is row and cell.statistics == way]
            shown = [_words(cell, digits) for cell in mine]
            rows.append((row.label, *([way] if several else []), *shown))
    base, metric = comparison.baseline.label, comparison.example.metric
    title = f"Test {metric} after compression, and the difference to {base} [interval]"
    return Table(header, tuple(rows), title, _notes(comparison, several))


def survival_sentence(comparison: Comparison) -> str:
    """`After compression: at 3 bits RWP (+6.80) is better than SGD; …`; empty if not measured."""
    every = survival_cells(comparison)
    cells = [cell for cell in every if cell.difference is not None]
    if not cells:
        return ""
    n = min(cell.difference.n for cell in cells if cell.difference is not None)
    if n < ENOUGH:
        return f"After compression: too few seeds for a verdict ({n}; {ENOUGH} are needed)."
    base, digits = comparison.baseline.label, _digits(comparison)
    several = len({cell.statistics for cell in cells}) > 1
    parts = []
    for statistics in dict.fromkeys(cell.statistics for cell in cells):
        said = [
            f"{_at(change)} {words}"
            for change in map(name_of, CHANGES)
            if (words := _found(cells, statistics, change, base, digits))
        ]
        way = f"BatchNorm {statistics}: " if several else ""
        parts.append(way + ("; ".join(said) or _nothing(cells, statistics, base, digits)))
    unit = f", in {comparison.example.unit}" if comparison.example.unit else ""
    verdicts = f"After compression (test {comparison.example.metric}{unit}): {'. '.join(parts)}."
    return f"{verdicts} {_damage(every, comparison, digits)}"


def survival_columns(comparison: Comparison) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Names of columns, and each row's numbers by its spec, for programs."""
    cells = survival_cells(comparison)
    names: dict[str, None] = {}
    numbers: dict[str, list[str]] = {row.spec: [] for row in comparison.rows}
    for cell in cells:
        stem = f"{'unchanged' if cell.change == UNCHANGED else cell.change}, {cell.statistics}"
        names |= dict.fromkeys(f"{stem}{end}" for end in ("", " difference", " low", " high"))
        said = cell.difference
        values = ("", "", "") if said is None else (said.mean, said.low, said.high)
        numbers[cell.row.spec] += [str(v) for v in (mean_std(cell.values)[0], *values)]
    return tuple(names), {spec: tuple(values) for spec, values in numbers.items()}


def _found(cells: list[Cell], statistics: str, change: str, base: str, digits: int) -> str:
    """`RWP (+6.80) is better than SGD`; empty if nothing is significant there."""
    here = [
        (cell.row.label, cell.difference)
        for cell in cells
        if (cell.statistics, cell.change) == (statistics, change) and cell.difference is not None
    ]
    means = [difference.mean for _, difference in here]
    said = []
    for verdict in ("better", "worse"):
        rows = [
            f"{name} ({signed(difference.mean, digits)})"
            for name, difference in here
            if difference.verdict == verdict
        ]
        if len(rows) > 2 and len(rows) == len(here):
            ends = [signed(end, digits) for end in (min(means), max(means))]
            return f"all {len(rows)} methods are {verdict} than {base} ({ends[0]} to {ends[1]})"
        if rows:
            said.append(f"{join_words(rows)} {'is' if len(rows) == 1 else 'are'} {verdict}")
    return f"{' and '.join(said)} than {base}" if said else ""


def _damage(cells: list[Cell], comparison: Comparison, digits: int) -> str:
    """`With 80 % pruned the metric moves by −5.7 (SGD), −1.9 (SAM) …`: the change's own part.

    For the change that costs the baseline most, with statistics as they are.
    """
    as_is = [cell for cell in cells if cell.statistics == cells[0].statistics]
    means = {(cell.row.label, cell.change): mean_std(cell.values)[0] for cell in as_is}
    moved = {(row, change): mean - means[row, UNCHANGED] for (row, change), mean in means.items()}
    sign = 1 if comparison.example.higher_is_better else -1
    base = comparison.baseline.label
    hardest = min(map(name_of, CHANGES), key=lambda change: sign * moved[base, change])
    each = [f"{signed(moved[r.label, hardest], digits)} ({r.label})" for r in comparison.rows]
    metric = comparison.example.metric
    return f"The change itself moves each method's own {metric}, {_at(hardest)}, by {join_words(each)}."


def _nothing(cells: list[Cell], statistics: str, base: str, digits: int) -> str:
    least = max(
        cell.difference.smallest
        for cell in cells
        if cell.statistics == statistics and cell.difference is not None
    )
    return f"no significant difference to {base} (minimum detectable difference {least:.{digits}f})"


def _digits(comparison: Comparison) -> int:
    """One for metrics in per cent: a table of many cells has no room for more."""
    return 1 if comparison.example.unit else metric_digits(comparison)


def _at(change: str) -> str:
    short = change.partition(",")[0]
    return f"with {short}" if "pruned" in short else f"at {short}"


def _words(cell: Cell, digits: int) -> str:
    if not cell.values:
        return "diverged"
    mean = f"{mean_std(cell.values)[0]:.{digits}f}"
    return mean if cell.difference is None else f"{mean} {interval_words(cell.difference, digits)}"


def _value(result: Result, statistics: str, change: str) -> float:
    return result.compressed[statistics][change][result.metric]


def _paired(row: Row, base: Row, statistics: str, change: str) -> list[float]:
    return [
        _value(a, statistics, change) - _value(b, statistics, change)
        for a, b in zip(row.results, base.results, strict=True)
        if a.status == b.status == "finished"
    ]


def _notes(comparison: Comparison, several: bool) -> tuple[str, ...]:
    sentence = survival_sentence(comparison)
    about = (
        "Weights of two or more dimensions without embeddings: rounded to nearest, symmetric, one scale "
        "per filter, 2^bits - 1 levels (2 bits would be three); or the smallest of each tensor set to zero. Differences are paired by seed, with "
        "t-intervals at the level of Holm's test over all cells of this table."
    )
    if several:
        about += (
            f" Recalibrated: BatchNorm statistics recomputed after the change from up to {RECALIBRATION} "
            "training samples, augmented as in training."
        )
    notes = (*([sentence] if sentence else []), about)
    ours = [row.strength for row in comparison.rows if row.spec.partition(":")[0] in RANDOM]
    if ours and "rise 0.2" not in ours:
        notes += (f"The setting for compression is not in this table: add {LARGE}.",)
    return notes
