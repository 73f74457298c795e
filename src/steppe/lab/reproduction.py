"""The paper's tables beside ours: paper, ours, n, difference. Only runs of full recipes count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from steppe.lab import published
from steppe.lab.errors import LabError, unknown
from steppe.lab.published import Cell
from steppe.lab.recipes import recipe
from steppe.lab.results import Result, stored
from steppe.lab.runs import DEFAULT_STORE, Store
from steppe.lab.specs import label, parse
from steppe.lab.statistics import mean_std, mean_words
from steppe.lab.tables import Table, signed

TABLES = ("overview", "cifar", "imagenet", "batches")
SMALLER = (
    "Ours are finished runs of the full recipe in the run store, final model. Runs with any other "
    "setting (fewer epochs, narrower models, less data) never enter this table."
)


def table(name: str, store: str | Path = DEFAULT_STORE) -> Table:
    """One of the paper's tables, filled from the run store."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    ours = full_runs(Store(Path(store)))
    if name == "overview":
        return _stated(_overview(ours), published.OVERVIEW, ours, store)
    cells = {
        "cifar": published.CIFAR,
        "imagenet": published.IMAGENET,
        "batches": published.BATCHES,
    }[name]
    titles = {
        "cifar": "Table 2: test accuracy on CIFAR-10 and CIFAR-100, %",
        "imagenet": "Table 3: top-1 accuracy on ImageNet, %",
        "batches": "Same or different batches for the two gradients, CIFAR-100, ResNet-18, %",
    }
    rows = tuple(_row(cell, ours[key(cell)]) for cell in cells)
    header = ("recipe", "method", "paper", "ours", "n", "difference")
    return _stated(Table(header, rows, titles[name], (SMALLER,)), cells, ours, store)


def _stated(
    table: Table, cells: Sequence[Cell], ours: dict[str, list[Result]], store: str | Path
) -> Table:
    """The table; where no full-size run exists, without our columns and with a note that says so."""
    if any(ours[key(cell)] for cell in cells):
        return table
    empty = ("radius (measured)", "ours", "n", "difference")
    kept = [i for i, name in enumerate(table.header) if name not in empty]
    note = (
        f"These are the paper's numbers alone: the store {store} has no finished run of a full "
        f"recipe. steppe train {cells[0].recipe} --method arwp trains one (use a GPU: on two CPU "
        "cores it takes more than a day). Runs with any other setting (fewer epochs, narrower "
        "models, less data) are not shown here."
    )
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return Table(tuple(table.header[i] for i in kept), rows, table.title, (note,))


def key(cell: Cell) -> str:
    """The experiment that a published cell stands for."""
    return recipe(cell.recipe, cell.method).experiment


def full_runs(store: Store) -> dict[str, list[Result]]:
    """Finished runs of the store by experiment, one per seed."""
    found: dict[str, dict[int, Result]] = defaultdict(dict)
    for run in store.runs():
        try:
            result = stored(run)
        except LabError:  # a run written by another version does not belong here
            continue
        if result is not None and result.status == "finished":
            found[result.config.experiment][result.config.seed] = result
    runs: dict[str, list[Result]] = defaultdict(list)
    runs.update({name: list(seeds.values()) for name, seeds in found.items()})
    return runs


def _row(cell: Cell, ours: list[Result]) -> tuple[str, ...]:
    config = recipe(cell.recipe, cell.method)
    return (
        cell.recipe,
        label(parse(cell.method), config.optimizer),
        str(cell),
        *_ours(cell, ours),
    )


def _ours(cell: Cell, ours: list[Result]) -> tuple[str, str, str]:
    """Our mean and deviation, n, and the difference to the paper."""
    if not ours:
        return "–", "0", "–"
    scores = [result.score() for result in ours]
    return mean_words(scores), str(len(ours)), signed(mean_std(scores)[0] - cell.mean)


def _overview(ours: dict[str, list[Result]]) -> Table:
    header = (
        *("method", "radius (paper)", "radius (measured)", "uses gradients", "compute", "time"),
        *("paper", "ours", "n", "difference"),
    )
    rows = []
    for cell in published.OVERVIEW:
        runs = ours[key(cell)]
        radii = [r.perturbation["radius"] for r in runs if "radius" in r.perturbation]
        rows.append(
            (
                label(parse(cell.method)),
                published.RADIUS[cell.method],
                f"{mean_std(radii)[0]:.3g}" if radii else "–",
                published.GRADIENT[cell.method],
                published.WORK[cell.method],
                published.TIME[cell.method],
                str(cell),
                *_ours(cell, runs),
            )
        )
    measured = "Radius: ‖eps‖ at the end of each epoch, mean over the training. " + SMALLER
    return Table(header, tuple(rows), "Table 1: the methods, ResNet-50 on ImageNet", (measured,))
