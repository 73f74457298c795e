"""`sweep`: a grid over any fields of the config and any options of the method."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from steppe.lab.coercion import literal
from steppe.lab.config import Config, as_config
from steppe.lab.engines import Engine, Job, chosen, run_all, seed_numbers
from steppe.lab.errors import LabError, looked_up
from steppe.lab.naming import shown_name
from steppe.lab.problems import Sources
from steppe.lab.progress import Progress
from steppe.lab.results import Result
from steppe.lab.runs import DEFAULT_STORE
from steppe.lab.specs import option_names, parse
from steppe.lab.statistics import mean_words
from steppe.lab.tables import Format, Table
from steppe.lab.tuning import RISES, better, score

Grid = Mapping[str, Sequence[object]]

SEARCHES: dict[str, Grid] = {
    "rise": {"rise": RISES},
    "rho": {"rho": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)},
    "rho-vit": {"rho": (0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5)},
    "sigma": {"sigma": (0.005, 0.01, 0.015, 0.02)},
    "eta-beta": {"eta": (0.01, 0.1, 1), "beta": (0.9, 0.99, 0.999)},
    "sigma-lam": {"sigma": (0.005, 0.01, 0.015, 0.02), "lam": (0.1, 0.3, 0.5, 0.7, 0.9)},
}
"""The search for a rise, the paper's searches, and its sensitivity studies (Figure 4)."""
UNCHANGED = "as it is"


@dataclass(frozen=True)
class Point:
    """One combination of values, over all seeds; no values: the method as it stands."""

    values: dict[str, object]
    results: tuple[Result, ...]

    def scores(self, split: str) -> list[float]:
        return [result.score(split) for result in self.results if result.status == "finished"]


@dataclass(frozen=True)
class Sweep:
    """All points of a grid; `split` is what they are judged on."""

    config: Config
    points: tuple[Point, ...]
    split: str

    def best(self) -> Point:
        """The point with the best mean; only a sweep on validation data may choose.

        In a search for the rise alone, the method as it stands unless the best is better by more than
        the standard error of the paired difference (with several seeds).
        """
        if self.split != "validation":
            raise LabError("a best point is chosen on validation data: sweep with validation=0.2.")
        usual, *others = self.points
        candidates = self.points
        if not usual.values and len(usual.results) > 1:
            candidates = tuple(p for p in others if better(p.results, usual.results))
        return max(candidates, key=lambda point: score(point.results), default=usual)

    def table(self, form: Format = "text", width: int | None = None) -> str:
        """One row per point; text in lines of at most `width`, if given."""
        metric = self.points[0].results[0].metric
        names = tuple(self.points[-1].values)
        rows = []
        for point in self.points:
            scores = point.scores(self.split)
            shown = mean_words(scores, ".4g", ".2g") if scores else "diverged"
            values = tuple(str(point.values.get(name, UNCHANGED)) for name in names)
            rows.append((*values, shown, str(len(scores))))
        note: tuple[str, ...] = ()
        if self.split == "validation":
            best = ", ".join(f"{name}={value}" for name, value in self.best().values.items())
            note = (f"Best on the validation split: {best or UNCHANGED}.",)
        data, model = shown_name(self.config.data), shown_name(self.config.model)
        title = f"{data}, {model}, {self.config.method}"
        header = (*names, f"{self.split} {metric}", "n")
        return Table(header, tuple(rows), title, note).render(form, width)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        points = [
            {"values": point.values, "runs": [result.to_dict() for result in point.results]}
            for point in self.points
        ]
        return {"config": self.config.to_dict(), "split": self.split, "points": points}

    def _repr_html_(self) -> str:
        return f"<pre>{self.table()}</pre>"


def sweep(
    config: Config | Mapping[str, object],
    grid: Grid,
    seeds: int | Sequence[int] = 1,
    *,
    sources: Sources | None = None,
    store: str | Path | None = DEFAULT_STORE,
    jobs: int | None = None,
    engine: Engine | Literal["local", "ray"] = "local",
    progress: Progress = None,
) -> Sweep:
    """Train every combination of the grid's values; keys are config fields or method options.

    With `config.validation` above zero the points are judged on the validation split, and `best()`
    is the best of them; without, the test metric is shown and no point is chosen. `jobs`, `engine` and `progress` as in `compare`.
    """
    place = chosen(engine, jobs)
    config = as_config(config)
    config = config.replace(threads=config.threads or place.threads)
    if not grid:
        names = ", ".join(SEARCHES)
        raise LabError(f"say what to vary: --over lr=.01,.1 or --search one of {names}.")
    lists = isinstance(grid, Mapping) and not any(
        isinstance(values, str) or not isinstance(values, Iterable) for values in grid.values()
    )
    if not lists:
        raise LabError(f'grid names lists of values, as in {{"rise": [0.05, 0.1]}}; got {grid!r}.')
    numbers = seed_numbers(seeds, "sweep")
    combinations = [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
    ]
    if set(grid) == {"rise"}:
        combinations.insert(0, {})  # a search for the strength begins with what there is
    work = []
    for values in combinations:
        about = " ".join(f"{name} {value}" for name, value in values.items()) or UNCHANGED
        point = with_values(config, values)
        work += [Job(f"{about} seed {seed}", point.replace(seed=seed)) for seed in numbers]
    results = run_all(
        work, sources or Sources(), store, engine=place, progress=progress, title="sweep"
    )
    points = tuple(
        Point(values, tuple(results[i * len(numbers) : (i + 1) * len(numbers)]))
        for i, values in enumerate(combinations)
    )
    return Sweep(config, points, "validation" if config.validation else "test")


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """The config with method options and fields set by name."""
    spec = parse(config.method)
    options = {name: value for name, value in values.items() if name in option_names(spec.name)}
    fields = {name: value for name, value in values.items() if name not in options}
    changed = spec.with_options(**options)  # type: ignore[arg-type]
    return parse(str(changed)).apply(config).override(fields)


def parse_grid(texts: Sequence[str]) -> dict[str, Sequence[object]]:
    """`("eta=.01,.1", "beta=.9,.99")` as a grid."""
    grid: dict[str, Sequence[object]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not (sign and name and values):
            raise LabError(f"write what to vary as NAME=VALUE,VALUE,…; got {text!r}.")
        grid[name.replace("-", "_")] = [literal(value) for value in values.split(",")]
    return grid


def search(name: str) -> Grid:
    """One of the paper's searches by name."""
    return looked_up("search", name, SEARCHES)
