"""The paper's tables (Li et al., TMLR 2024: test accuracy in per cent) beside ours.

Only runs of full recipes count.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steppe.lab.errors import looked_up
from steppe.lab.recipes import recipe
from steppe.lab.results import by_experiment, readable
from steppe.lab.runs import DEFAULT_STORE, Store
from steppe.lab.specs import PAPER, label, parse
from steppe.lab.statistics import mean_std, mean_words
from steppe.lab.tables import Table, signed


@dataclass(frozen=True)
class Cell:
    """One published result: a recipe, a method's spec, its mean, and the deviation of three runs."""

    recipe: str
    method: str
    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


def _cells(columns: dict[str, str]) -> tuple[Cell, ...]:
    """Cells from a column of `mean` or `mean±std` per recipe, methods in the paper's order."""
    cells = []
    for name, text in columns.items():
        for method, number in zip(PAPER, text.split(), strict=True):
            mean, _, std = number.partition("±")
            cells.append(Cell(name, method, float(mean), float(std) if std else None))
    return tuple(cells)


CIFAR = _cells(
    {
        "cifar10-vgg16-bn": "94.96±.15 95.43±.11 94.97±.07 95.07±.23 95.49±.16 95.61±.23",
        "cifar10-resnet18": "96.10±.08 96.56±.11 96.01±.31 96.30±.03 96.58±.09 96.68±.13",
        "cifar10-wrn-28-10": "96.85±.05 97.35±.04 96.73±.12 96.89±.11 97.21±.04 97.27±.09",
        "cifar10-vit-s": "86.60±.03 87.48±.28 86.53±.04 86.88±.09 87.71±.13 88.18±.19",
        "cifar100-vgg16-bn": "75.43±.29 76.74±.22 76.56±.10 77.07±.21 77.68±.14 77.98±.19",
        "cifar100-resnet18": "78.10±.39 80.48±.25 80.21±.14 80.71±.24 81.18±.09 81.38±.12",
        "cifar100-wrn-28-10": "82.51±.24 84.68±.21 83.67±.14 83.96±.09 84.37±.11 84.62±.15",
        "cifar100-vit-s": "63.66±.28 64.83±.24 63.67±.41 64.12±.22 65.67±.09 66.13±.13",
    }
)
"""Table 2."""

IMAGENET = _cells(
    {
        "imagenet-vgg16-bn": "73.11 74.65 74.01 74.28 75.45 75.79",
        "imagenet-resnet18": "70.32 70.77 70.46 70.71 71.42 71.58",
        "imagenet-resnet50": "76.62 77.15 76.77 77.02 77.82 78.04",
        "imagenet-vit-s32": "68.12 68.98 68.40 68.74 69.42 69.76",
    }
)
"""Table 3, one run each."""

BATCHES = (
    Cell("cifar100-resnet18", "sam", 80.48, 0.25),
    Cell("cifar100-resnet18", "sam:same_batch=false", 78.30, 0.11),
    Cell("cifar100-resnet18", "m-arwp:same_batch=true", 81.14, 0.10),
    Cell("cifar100-resnet18", "m-arwp", 81.38, 0.12),
)
"""The same or different batches for the two gradients of a step."""

OVERVIEW = tuple(cell for cell in IMAGENET if cell.recipe == "imagenet-resnet50")
"""Table 1 gives ResNet-50's accuracy on ImageNet."""

METHODS = {
    "sgd": ("–", "–", "1×", "1×"),
    "sam": ("small", "yes", "2×", "2×"),
    "rwp": ("medium", "no", "1×", "1×"),
    "arwp": ("medium", "yes", "1×", "1×"),
    "m-rwp": ("large", "no", "2×", "1×"),
    "m-arwp": ("large", "yes", "2×", "1×"),
}
"""Table 1: perturbation radius, gradient information in it, compute, time with parallel passes."""

TABLES = {
    "overview": ("Table 1: the methods, ResNet-50 on ImageNet", OVERVIEW),
    "cifar": ("Table 2: test accuracy on CIFAR-10 and CIFAR-100, %", CIFAR),
    "imagenet": ("Table 3: top-1 accuracy on ImageNet, %", IMAGENET),
    "batches": (
        "Same or different batches for the two gradients, CIFAR-100, ResNet-18, %",
        BATCHES,
    ),
}
MEASURED = "radius (measured)"
OURS = ("ours", "n", "difference")
SMALLER = (
    "Ours are finished runs of the full recipe in the run store, final model. Runs with any other "
    "setting (fewer epochs, narrower models, less data) never enter this table."
)


def table(name: str, store: str | Path = DEFAULT_STORE) -> Table:
    """One of the paper's tables, filled from the run store."""
    title, cells = looked_up("table", name, TABLES)
    ours = by_experiment(r for r in readable(Store(Path(store))) if r.status == "finished")
    about: tuple[str, ...] = ("recipe", "method")
    note = SMALLER
    if name == "overview":
        about = ("method", "radius (paper)", MEASURED, "uses gradients", "compute", "time")
        note = f"Radius: ‖eps‖ at the end of each epoch, mean over the training. {SMALLER}"
    header = (*about, "paper", *OURS)
    rows: list[tuple[str, ...]] = []
    found = False
    for cell in cells:
        config = recipe(cell.recipe, cell.method)
        runs = list(ours.get(config.experiment, {}).values())
        found = found or bool(runs)
        scores = [result.score() for result in runs]
        shown: tuple[str, ...] = (cell.recipe, label(parse(cell.method), config.optimizer))
        if name == "overview":
            radius, *rest = METHODS[cell.method]
            radii = [r.perturbation["radius"] for r in runs if "radius" in r.perturbation]
            shown = (shown[1], radius, f"{mean_std(radii)[0]:.3g}" if radii else "–", *rest)
        difference = signed(mean_std(scores)[0] - cell.mean) if runs else "–"
        rows.append((*shown, str(cell), mean_words(scores), str(len(runs)), difference))
    if found:
        return Table(header, tuple(rows), title, (note,))
    kept = [i for i, column in enumerate(header) if column not in (MEASURED, *OURS)]
    header, *rows = (tuple(row[i] for i in kept) for row in (header, *rows))
    note = (
        f"These are the paper's numbers alone: the store {store} has no finished run of a full "
        f"recipe. steppe train {cells[0].recipe} --method arwp trains one (use a GPU: on two CPU "
        "cores it takes more than a day). Runs with any other setting (fewer epochs, narrower "
        "models, less data) are not shown here."
    )
    return Table(header, tuple(rows), title, (note,))
