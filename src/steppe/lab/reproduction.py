"""The paper's tables beside ours: paper, ours, n, difference. Only runs of full recipes count."""

from __future__ import annotations

from collections import defaultdict
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

TABLES = {
    "overview": ("Table 1: the methods, ResNet-50 on ImageNet", published.OVERVIEW),
    "cifar": ("Table 2: test accuracy on CIFAR-10 and CIFAR-100, %", published.CIFAR),
    "imagenet": ("Table 3: top-1 accuracy on ImageNet, %", published.IMAGENET),
    "batches": (
        "Same or different batches for the two gradients, CIFAR-100, ResNet-18, %",
        published.BATCHES,
    ),
}
OURS = ("ours", "n", "difference")
SMALLER = (
    "Ours are finished runs of the full recipe in the run store, final model. Runs with any other "
    "setting (fewer epochs, narrower models, less data) never enter this table."
)


def table(name: str, store: str | Path = DEFAULT_STORE) -> Table:
    """One of the paper's tables, filled from the run store."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    (title, cells), ours = TABLES[name], full_runs(Store(Path(store)))
    rows = tuple(_row(cell, ours[key(cell)]) for cell in cells)
    table = Table(("recipe", "method", "paper", *OURS), rows, title, (SMALLER,))
    if name == "overview":
        table = _overview(title, ours)
    if any(ours[key(cell)] for cell in cells):
        return table
    return _without_ours(table, cells[0].recipe, store)


def _without_ours(table: Table, recipe: str, store: str | Path) -> Table:
    """The table where no full-size run exists: without our columns, with a note that says so."""
    empty = ("radius (measured)", *OURS)
    kept = [i for i, name in enumerate(table.header) if name not in empty]
    note = (
        f"These are the paper's numbers alone: the store {store} has no finished run of a full "
        f"recipe. steppe train {recipe} --method arwp trains one (use a GPU: on two CPU "
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
    return defaultdict(list, {name: list(seeds.values()) for name, seeds in found.items()})


def _row(cell: Cell, ours: list[Result]) -> tuple[str, ...]:
    name = label(parse(cell.method), recipe(cell.recipe, cell.method).optimizer)
    return (cell.recipe, name, str(cell), *_ours(cell, ours))


def _ours(cell: Cell, ours: list[Result]) -> tuple[str, str, str]:
    """Our mean and deviation, n, and the difference to the paper."""
    if not ours:
        return "–", "0", "–"
    scores = [result.score() for result in ours]
    return mean_words(scores), str(len(ours)), signed(mean_std(scores)[0] - cell.mean)


def _overview(title: str, ours: dict[str, list[Result]]) -> Table:
    header = ("method", "radius (paper)", "radius (measured)", "uses gradients", "compute", "time")
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
    return Table((*header, "paper", *OURS), tuple(rows), title, (measured,))
