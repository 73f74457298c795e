"""The commands that show what is there: recipes, runs, the paper's tables, data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from steppe.lab.commands import _write
from steppe.lab.errors import LabError, explained
from steppe.lab.options import Maybe, Words
from steppe.lab.recipes import PAPER, RECIPES, recipe
from steppe.lab.results import stored
from steppe.lab.runs import DEFAULT_STORE, Record, Run, Store
from steppe.lab.tables import Format, Table, as_csv, terminal_width


@dataclass(frozen=True)
class Recipes:
    """List the recipes: the paper's settings, and CPU-sized ones.

    With a name: its settings, as a config file that --config takes.
    """

    name: Annotated[Positional[Maybe[str]], tyro.conf.arg(metavar="RECIPE")] = None
    """Show this recipe's settings."""
    method: str = "sgd"
    """For this method."""

    def run(self) -> None:
        if self.name is not None:
            chosen = recipe(self.name, self.method).to_dict().items()
            _write("\n".join(f"{k} = {_toml(value)}" for k, value in chosen if value is not None))
            return
        kinds = {name: "the paper's" if name in PAPER else "CPU-sized" for name in RECIPES}
        _write(_left([(name, kind, RECIPES[name].about) for name, kind in kinds.items()]))
        _write("\nEach takes --method: sgd, sam, rwp, arwp, m-rwp, m-arwp (and asam, msam, …).")


@dataclass(frozen=True)
class Runs:
    """List runs, show one, or remove some.

    Example: steppe runs show digits-arwp-seed0; steppe runs show RUN --csv > metrics.csv
    """

    action: Positional[Literal["list", "show", "remove"]] = "list"
    """What to do."""
    names: Annotated[Positional[Words], tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Runs, by folder, name or a part of the name that no other run has."""
    csv: bool = False
    """As CSV: all results (list), or the metrics of each epoch (show)."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""

    def run(self) -> None:
        store = Store(self.store)
        if self.action == "list":
            _write(self._list(store.runs()))
            return
        if not self.names:
            raise LabError(f"say which run to {self.action}: steppe runs {self.action} NAME.")
        for run in [store.get(name) for name in self.names]:
            if self.action == "show":
                _write(as_csv(run.metrics) if self.csv else _about(run))
            else:
                store.remove(run)
                _write(f"removed {run.folder}")

    def _list(self, runs: list[Run]) -> str:
        if not runs:
            return f"No runs in {self.store} yet. The first: steppe train digits"
        records = []
        for run in runs:
            record: Record = {"run": run.name, "status": run.status}
            if (result := stored(run)) is None:
                record["step"] = run.progress()
            else:
                record |= {"step": result.steps, "metric": result.metric}
                record["seconds"] = round(result.seconds, 1)
                if result.status == "finished":
                    record["test"] = result.score()
            records.append(record)
        if self.csv:
            return as_csv(records)
        names = ("run", "status", "step", "metric", "test", "seconds")
        rows = [[record.get(name, "–") for name in names] for record in records]
        cells = tuple(
            tuple(f"{c:.4g}" if isinstance(c, float) else str(c) for c in r) for r in rows
        )
        return Table(names, cells).text()


@dataclass(frozen=True)
class PaperTable:
    """Show a table of the paper beside runs of the full recipes.

    Example: steppe table cifar
    """

    name: Annotated[Positional[str], tyro.conf.arg(metavar="{overview,cifar,imagenet,batches}")]
    """Table 1, Table 2, Table 3, or the ablation over batches."""
    format: Format = "text"
    """Format of the printed table."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""

    def run(self) -> None:
        from steppe.lab import reproduction

        table = reproduction.table(self.name, self.store)
        _write(table.render(self.format, terminal_width()))


@dataclass(frozen=True)
class DataSets:
    """List available data sets, download one, or verify one.

    Example: steppe data fetch cifar10
    """

    action: Positional[Literal["list", "fetch", "verify"]] = "list"
    """What to do."""
    names: Annotated[Positional[Words], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """Data sets."""
    root: Maybe[Path] = None
    """The folder of data sets. Not given: $STEPPE_DATA, or ~/.cache/steppe."""
    url: Maybe[str] = None
    """A mirror to download from."""

    def run(self) -> None:
        from steppe.lab import data

        if self.action == "list":
            found = {item.name: item.where for item in data.available(self.root)}
            rows = [(name, found.get(name, "not downloaded")) for name in data.names()]
            _write(_left(rows))
            _write("\nAlso: a folder of class folders of images, FILE.csv, module:function.")
            return
        if not self.names:
            raise LabError(f"say what to {self.action}: steppe data {self.action} cifar10.")
        for name in self.names:
            with explained(f"{self.action} {name}"):
                if self.action == "fetch":
                    _write(f"{name} is in {data.fetch(name, self.root, self.url)}")
                else:
                    _write(data.verify(name, self.root))


def _about(run: Run) -> str:
    """A run in a few lines: result, where it ran, its files."""
    result = stored(run)
    lines = [f"{run.folder}  ({run.status})"]
    if result is None:
        lines.append(f"step {run.progress()}; resume with: steppe train --resume {run.folder}")
    else:
        lines.append(result.table())
    lines += [f"{name:10} {value}" for name, value in run.environment.items() if value is not None]
    return "\n".join(lines)


def _left(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _toml(value: object) -> str:
    """As TOML writes it, which but for tables is as JSON does."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
