"""What a report shows: a comparison, the epochs of its runs and their stored analyses."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from steppe.lab.comparison import Comparison, Row
from steppe.lab.runs import DEFAULT_STORE
from steppe.report.analyses import Stored, load
from steppe.report.subjects import runs_of

LONGEST = 17
"""So many letters of a name fit beside a mark."""


@dataclass(frozen=True)
class Gathered:
    """A comparison, the names it was asked for by, and the store behind it."""

    comparison: Comparison
    names: Sequence[str] = ()
    store: Path = DEFAULT_STORE

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.comparison.rows

    def shortened(self) -> tuple[Gathered, dict[str, str]]:
        """The same with labels that fit a chart, and a key of those that were changed."""
        heads = [_head(row.label) for row in self.rows]
        seen: Counter[str] = Counter()
        rows, key = [], {}
        for row, head in zip(self.rows, heads, strict=True):
            seen[head] += 1
            short = head if heads.count(head) == 1 else f"{head} {seen[head]}"
            if len(row.label) <= LONGEST:
                short = row.label
            elif short != row.label:
                key[short] = row.label
            rows.append(replace(row, label=short))
        if not key:
            return self, key
        comparison = replace(self.comparison, rows=tuple(rows))
        return replace(self, comparison=comparison), key

    def stored(self, name: str) -> dict[int, dict[int, Stored]]:
        """An analysis by the number of its row and by seed."""
        found: dict[int, dict[int, Stored]] = {}
        for index, row in enumerate(self.rows):
            for run in runs_of(row):
                if (analysis := load(run, name)) is not None:
                    found.setdefault(index, {})[run.config.seed] = analysis
        return found

    def every(self, name: str) -> dict[int, list[Any]]:
        """The results of an analysis by row: of the seeds that all rows with results have."""
        found = self.stored(name)
        common = set.intersection(*map(set, found.values())) if found else set()
        return {row: [of[s].result for s in of if s in common] for row, of in found.items()}

    @cached_property
    def analyses(self) -> dict[str, dict[int, Stored]]:
        """All stored analyses by name and row, one of each row."""
        cases = ("worst", "average", "worst-adaptive", "average-adaptive")
        names = ["landscape", "spectrum", "radius", "robustness"]
        names += [f"sharpness-{case}" for case in cases]
        found = {
            name: {row: next(iter(of.values())) for row, of in self.stored(name).items()}
            for name in names
        }
        return {name: rows for name, rows in found.items() if rows}

    def results(self, name: str) -> dict[int, Any]:
        """The results of an analysis by row."""
        return {row: stored.result for row, stored in self.analyses.get(name, {}).items()}

    def epochs(self, row: Row) -> list[list[dict[str, float]]]:
        """The records of each finished run of a row."""
        return [metrics for run in runs_of(row) if (metrics := run.metrics)]

    def command(self, words: str) -> str:
        """A command about these runs, to be typed."""
        store = [] if self.store == DEFAULT_STORE else ["--store", str(self.store)]
        return f"{words} {shlex.join([*self.names, *store])}"


def _head(label: str) -> str:
    """`SGD` of `SGD (lr 0.01, batch 256)`."""
    head = label.partition(" (")[0]
    return head if len(head) <= LONGEST else f"{head[: LONGEST - 1]}…"
