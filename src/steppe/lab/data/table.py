"""Tables: a CSV file with a target column, as numbers that a network takes."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from steppe.lab.data.order import held_out
from steppe.lab.data.split import Data
from steppe.lab.naming import unknown

SUFFIXES = (".csv", ".tsv")
DELIMITERS = (",", ";", "\t", "|")
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
MOST_CLASSES = 20
"""Whole numbers with more different values are taken for a regression."""
MOST_WORDS = 50
"""A column of more different texts says nothing about rows that were not seen."""


class Column:
    """One column: its texts, where they are missing, and the numbers they are, if all of them are
    (NaN: missing)."""

    def __init__(self, name: str, texts: Sequence[str]) -> None:
        self.name, self.texts = name, texts
        self.missing = [i for i, text in enumerate(texts) if text.lower() in MISSING]
        values = [math.nan if t.lower() in MISSING else _number(t) for t in texts]
        known = [value for value in values if value is not None and not math.isinf(value)]
        whole = len(known) == len(texts)
        self.numbers = torch.tensor(known, dtype=torch.float64) if whole else None


def table(
    path: Path,
    *,
    target: str | None = None,
    task: Literal["classification", "regression"] | None = None,
    test: float = 0.2,
    without: str = "",
    seed: int = 0,
) -> Data:
    """A CSV or TSV file whose first line names the columns; `target` is the one to predict.

    A target of text, or of at most 20 different whole numbers, means classes; any other
    numbers a regression (`task` decides otherwise). `test` of the rows are the test split, drawn by
    `seed`. Numbers are brought to mean 0 and standard deviation 1 with the training rows'
    statistics, those of a regression's target too; a missing number becomes the mean. A column of
    text becomes one input per different text. `without` names columns to leave out, by commas.
    """
    columns = read_columns(path)
    names = [column.name for column in columns]
    if target is None:
        raise ValueError(
            f"{path.name} has the columns {', '.join(names)}: say which one to predict, "
            f"--target {names[-1]} (in Python, target={names[-1]!r} of data.load, or "
            f"config={{'data_options': {{'target': {names[-1]!r}}}}})."
        )
    left_out = [name.strip() for name in str(without).split(",") if name.strip()]
    for name in (target, *left_out):
        if name not in names:
            raise unknown(f"column of {path.name}", name, names)
    aim = next(column for column in columns if column.name == target)
    labels, classes = _targets(aim, task, path.name)
    aside = held_out(labels, test, seed=seed, key="test")
    chosen = [c for c in columns if c.name not in (target, *left_out)]
    if not chosen:
        raise ValueError(f"{path.name} has no column besides the target {target!r}.")
    inputs = torch.cat([_inputs(column, ~aside, path.name) for column in chosen], dim=1)
    note = f"{len(labels)} rows, {int(aside.sum())} of them test"
    if classes is None:
        mean, std = _moments(labels[~aside])
        labels = ((labels - mean) / std).to(torch.float32)
        note += f"; {target} in standard deviations of {std:.4g}"
    filled = sum(len(column.missing) for column in chosen if column.numbers is not None)
    if filled:
        note += f"; {filled} missing numbers set to the mean"
    return Data.divided(path.name, inputs, labels, aside, classes=classes, note=note)


def read_columns(path: Path) -> list[Column]:
    """The columns of the file; an error names the line that does not fit."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8. Save it as CSV in UTF-8.") from None
    lines = text.splitlines()
    delimiter = max(DELIMITERS, key=lambda mark: lines[0].count(mark)) if lines else ","
    numbered = enumerate(csv.reader(lines, delimiter=delimiter), start=1)
    rows = [(number, [cell.strip() for cell in row]) for number, row in numbered if any(row)]
    if len(rows) < 3:
        raise ValueError(f"{path} must have a line of column names and at least two rows.")
    header = rows[0][1]
    if len(set(header)) < len(header) or "" in header or None not in map(_number, header):
        raise ValueError(
            f"the first line of {path} must name the columns, each differently; it is "
            f"{delimiter.join(header)[:60]!r}."
        )
    for number, row in rows[1:]:
        if len(row) != len(header):
            raise ValueError(
                f"line {number} of {path} has {len(row)} cells, but there are {len(header)} columns."
            )
    cells = zip(*(row for _, row in rows[1:]), strict=True)
    return [Column(name, texts) for name, texts in zip(header, cells, strict=True)]


def _targets(
    column: Column, task: Literal["classification", "regression"] | None, file: str
) -> tuple[Tensor, int | None]:
    """The targets as class indices with their count, or as numbers."""
    if column.missing:
        raise ValueError(
            f"{file}: the target {column.name!r} is missing in {len(column.missing)} rows, the "
            f"first of them row {column.missing[0] + 1}. Remove these rows."
        )
    numbers = column.numbers
    if task is None:
        whole = numbers is not None and bool((numbers == numbers.round()).all())
        few = len(set(column.texts)) <= MOST_CLASSES
        task = "classification" if numbers is None or (whole and few) else "regression"
    if task == "regression":
        if numbers is None:
            word = next((t for t in column.texts if _number(t) is None), "infinity")
            raise ValueError(
                f"{file}: a regression needs numbers, but {column.name!r} has {word!r}."
            )
        return numbers, None
    values: Sequence[Any] = column.texts if numbers is None else numbers.tolist()
    classes, index = numpy.unique(values, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"{file}: the target {column.name!r} has a single value, {values[0]!r}.")
    return torch.from_numpy(index), len(classes)


def _inputs(column: Column, train: Tensor, file: str) -> Tensor:
    """The column as standardised numbers, or as one input per text."""
    numbers = column.numbers
    if numbers is not None:
        mean, std = _moments(numbers[train])
        scaled = (numbers - mean) / std
        return scaled.nan_to_num(0.0).to(torch.float32).unsqueeze(1)
    words, index = numpy.unique(column.texts, return_inverse=True)
    if len(words) > MOST_WORDS:
        raise ValueError(
            f"{file}: the column {column.name!r} has {len(words)} different texts, more than "
            f"{MOST_WORDS}. Leave it out: --set data_options.without={column.name!r}."
        )
    return torch.nn.functional.one_hot(torch.from_numpy(index), len(words)).to(torch.float32)


def _moments(values: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of what is there; 1 where nothing varies."""
    there = values[~values.isnan()]
    if len(there) == 0:
        return 0.0, 1.0
    std = float(there.std(unbiased=False))
    return float(there.mean()), std if std > 0 else 1.0


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
