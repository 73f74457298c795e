"""What a comparison says about compression: paired differences, a table, a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from steppe.analysis.robustness_result import moved_words
from steppe.lab.compression import CHANGES, RECALIBRATION, name_of
from steppe.lab.sentences import interval_words, metric_digits, shown_metric, verdict_words
from steppe.lab.specs import LARGE
from steppe.lab.statistics import ENOUGH, Difference, compare_all, mean_std
from steppe.lab.tables import Table, join_words, signed
from steppe.schedules import RISE

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
    difference: Difference | None = None
    """To the baseline after the same change; None for the baseline and the unchanged model."""


def survival_cells(comparison: Comparison) -> list[Cell]:
    """Every method after every change, differences corrected by Holm over all of them.

    Empty where some finished run was not measured.
    """
    runs = [result for row in comparison.rows for result in row.finished]
    if not runs or not all(result.compressed for result in runs):
        return []

    def value(result: Result) -> float:
        return result.compressed[statistics][change][result.metric]

    cells: list[Cell] = []
    differences: dict[int, list[float]] = {}
    for statistics in runs[0].compressed:
        for change in (UNCHANGED, *map(name_of, CHANGES)):
            for row in comparison.rows:
                if change != UNCHANGED and row is not comparison.baseline:
                    pairs = row.pairs(comparison.baseline)
                    differences[len(cells)] = [value(a) - value(b) for a, b in pairs]
                cells.append(Cell(row, change, statistics, tuple(map(value, row.finished))))
    up = comparison.example.higher_is_better
    found = compare_all(list(differences.values()), higher_is_better=up)
    for place, difference in zip(differences, found, strict=True):
        cells[place] = replace(cells[place], difference=difference)
    return cells


def survival_table(comparison: Comparison) -> Table | None:
    """One row per method: the deciding metric after each change and its difference from the baseline.

    None where it was not measured.
    """
    cells = survival_cells(comparison)
    if not cells:
        return None
    digits = cell_digits(comparison)
    ways = list(dict.fromkeys(cell.statistics for cell in cells))
    several = len(ways) > 1
    short = [name_of(change).partition(",")[0] for change in CHANGES]
    header = ("method", *(["BatchNorm"] if several else []), "unchanged", *short)
    rows = []
    for row in comparison.rows:
        for way in ways:
            mine = [cell for cell in cells if cell.row is row and cell.statistics == way]
            shown = []
            for cell in mine:
                gain = f" {interval_words(cell.difference, digits)}" if cell.difference else ""
                mean = f"{mean_std(cell.values)[0]:.{digits}f}"
                shown.append(f"{mean}{gain}" if cell.values else "diverged")
            rows.append((row.label, *([way] if several else []), *shown))
    base, metric = comparison.baseline.label, shown_metric(comparison.example.metric)
    title = f"Test {metric} after compression, and the difference from {base} [interval]"
    return Table(header, tuple(rows), title, _notes(comparison, cells))


def survival_sentence(comparison: Comparison) -> str:
    """`After compression: at 3 bits RWP (+6.80) is better than SGD; …`; empty if not measured."""
    every = survival_cells(comparison)
    cells = [(cell, cell.difference) for cell in every if cell.difference is not None]
    if not cells:
        return ""
    n = min(difference.n for _, difference in cells)
    if n < ENOUGH:
        return f"After compression: too few seeds for a verdict ({n}; {ENOUGH} are needed)."
    base, digits = comparison.baseline.label, cell_digits(comparison)
    ways = list(dict.fromkeys(cell.statistics for cell, _ in cells))
    parts = []
    for way in ways:
        here = [(cell, difference) for cell, difference in cells if cell.statistics == way]
        said = []
        for change in map(name_of, CHANGES):
            rows = [(cell.row, difference) for cell, difference in here if cell.change == change]
            if words := _found(rows, base, digits):
                said.append(f"{_at(change)} {words}")
        if not said:
            least = max(difference.smallest for _, difference in here)
            said = [
                f"no significant difference from {base} "
                f"(minimum detectable difference {least:.{digits}f})"
            ]
        parts.append((f"BatchNorm {way}: " if len(ways) > 1 else "") + "; ".join(said))
    unit = f", in {comparison.example.unit}" if comparison.example.unit else ""
    metric = shown_metric(comparison.example.metric)
    verdicts = f"After compression (test {metric}{unit}): {'. '.join(parts)}."
    return f"{verdicts} {_damage(every, comparison, digits)}"


def survival_numbers(cells: Sequence[Cell], row: Row) -> dict[str, float]:
    """A row's means and differences by name, for programs."""
    numbers = {}
    for cell in (cell for cell in cells if cell.row is row):
        stem = f"{'unchanged' if cell.change == UNCHANGED else cell.change}, {cell.statistics}"
        numbers[stem] = mean_std(cell.values)[0]
        if (found := cell.difference) is not None:
            numbers[f"{stem} difference"] = found.mean
            numbers |= {f"{stem} low": found.low, f"{stem} high": found.high}
    return numbers


def _found(rows: list[tuple[Row, Difference]], base: str, digits: int) -> str:
    """`RWP (+6.80) is better than SGD`; empty if nothing is significant there."""
    verdicts = {difference.verdict for _, difference in rows}
    if len(rows) > 2 and verdicts in ({"better"}, {"worse"}):
        means = [difference.mean for _, difference in rows]
        ends = f"{signed(min(means), digits)} to {signed(max(means), digits)}"
        return f"all {len(rows)} methods are {verdicts.pop()} than {base} ({ends})"
    said = " and ".join(verdict_words(rows, digits))
    return f"{said} than {base}" if said else ""


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
    metric = shown_metric(comparison.example.metric)
    return f"The change itself moves each method's own {metric}, {_at(hardest)}, by {join_words(each)}."


def cell_digits(comparison: Comparison) -> int:
    """One for metrics in per cent: a table of many cells has no room for more."""
    return 1 if comparison.example.unit else metric_digits(comparison)


def _at(change: str) -> str:
    short = change.partition(",")[0]
    return f"with {short}" if "pruned" in short else f"at {short}"


def _notes(comparison: Comparison, cells: list[Cell]) -> tuple[str, ...]:
    sentence = survival_sentence(comparison)
    about = (
        "Weights of two or more dimensions without embeddings: rounded to nearest, symmetric, one scale "
        "per filter, 2^bits - 1 levels (2 bits would be three); or the smallest of each tensor set to zero. Differences are paired by seed, with "
        "t-intervals at the level of Holm's test over all cells of this table."
    )
    if len({cell.statistics for cell in cells}) > 1:
        about += (
            f" Recalibrated: BatchNorm statistics recomputed after the change from up to {RECALIBRATION} "
            "training samples, augmented as in training."
        )
    same = [c for c in cells if c.change == UNCHANGED and comparison.example.unit]
    means = {(c.row.label, c.statistics): mean_std(c.values)[0] / 100 for c in same}
    fresh = {name: mean for (name, way), mean in means.items() if way == "recalibrated"}
    moved = moved_words({name: mean - means[name, "as is"] for name, mean in fresh.items()})
    return tuple(filter(None, [sentence, about, moved, _missing(comparison)]))


def _missing(comparison: Comparison) -> str:
    """Our methods stand here with two settings, the default (or the tuned one) and a rise of 0.2."""
    ours: dict[str, set[str]] = {}
    for row in comparison.rows:
        how = row.strength if row.chosen == "given" else f"rise {RISE:g}"
        ours.setdefault(row.spec.partition(":")[0], set()).update((row.strength, how))
    ours = {name: ours[name] for name in ours if name in RANDOM}
    absent = [name for name, found in ours.items() if f"rise {RISE:g}" not in found]
    if ours and not any("rise 0.2" in found for found in ours.values()):
        absent.append(LARGE)
    said = "Not in this table: the default (for safety) or the setting for compression. Add"
    return f"{said} {join_words(absent)}." if absent else ""
