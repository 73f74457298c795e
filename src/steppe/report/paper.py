"""The paper's figures from stored runs, or which runs are missing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.lab.comparison import Row
from steppe.lab.errors import LabError
from steppe.lab.recipes import recipe
from steppe.lab.results import Result, stored
from steppe.lab.runs import DEFAULT_STORE, Run, Store
from steppe.lab.specs import label, parse
from steppe.report import figures
from steppe.report.analyses import load
from steppe.report.studies import (
    Group,
    convergence_figure,
    generalisation_figure,
    groups_of,
    sensitivity_figure,
)
from steppe.report.subjects import compared, find_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger("steppe")

RECIPES = {
    "1": "cifar10-resnet18",
    "2": "cifar100-resnet18",
    "3": "cifar100-resnet18",
    "4": "cifar10-resnet18",
    "5": "cifar10-resnet18",
}
METHODS = {
    "1": ("sgd",),
    "2": ("rwp:sigma=.01", "m-rwp:sigma=.01"),
    "3": ("rwp", "m-rwp"),
    "5": ("sgd", "rwp", "arwp", "sam", "m-arwp"),
}
"""What the paper shows: by the recipe's own strengths where none is given."""

STUDIES = {
    "arwp": ("eta", "beta", "eta-beta"),
    "m-arwp": ("strength", "lam", "sigma-lam"),
}
"""Figure 4: by method the two options and the search that varies them."""


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper and the runs to draw it from."""

    number: str
    runs: Sequence[str] = ()
    recipe: str | None = None
    methods: Sequence[str] = ()
    store: Path = DEFAULT_STORE

    def draw(self) -> dict[str, Figure]:
        """The figure, or its parts by name."""
        if self.number == "theory":
            return {"": figures.tradeoff_figure()}
        if self.number == "2":
            return {"": convergence_figure(self._experiments())}
        if self.number == "3":
            return {"": generalisation_figure(self._ranges())}
        if self.number == "4":
            return {"": sensitivity_figure(self._studies())}
        return self._minima()

    @property
    def _recipe(self) -> str:
        return self.recipe or RECIPES[self.number]

    def _pool(self) -> list[Group]:
        """The runs named, or all of the recipe: any method, any seed, nothing else changed."""
        if self.runs:
            return groups_of(find_results(self.runs, self.store))
        wanted = recipe(self._recipe, "sgd").experiment
        found = []
        for run in Store(self.store).runs():
            result = _readable(run)
            if result and result.config.replace(method="sgd").experiment == wanted:
                found.append(result)
        return groups_of(found)

    def _experiments(self) -> dict[str, Group]:
        """One experiment a method, by its label; all of them, or what is missing."""
        pool = self._pool()
        if self.runs:
            rows = compared([result for group in pool for result in group.results]).rows
            return {_labelled(row): Group(row.finished) for row in rows}
        named, missing = {}, []
        for text in self.methods or METHODS[self.number]:
            config = recipe(self._recipe, text)
            group = next((g for g in pool if _same(g, config.experiment)), None)
            if group is None:
                missing.append(config.method)
            else:
                named[label(parse(config.method), config.optimizer)] = group
        if missing:
            follow = " --track-train" if self.number == "2" else ""
            raise self._lacks(
                f"runs of {', '.join(missing)}",
                f"steppe compare {' '.join(missing)} --recipe {self._recipe}{follow}",
            )
        return named

    def _ranges(self) -> dict[str, list[Group]]:
        """By method the experiments over its strength, at least two."""
        pool = self._pool()
        names = [parse(text).name for text in self.methods or METHODS["3"]]
        every = [g for g in pool if g.method in names]
        # A sigma and a ratio cannot share an axis: the kind with most experiments is drawn.
        kinds = Counter(g.kind for g in every)
        kind = max(kinds, key=lambda k: (kinds[k], k), default="")
        found = {name: [g for g in every if g.method == name and g.kind == kind] for name in names}
        if others := {k: count for k, count in kinds.items() if k != kind}:
            left = ", ".join(f"{count} by {k}" for k, count in others.items())
            logger.info("figure 3 goes by %s; experiments left out: %s", kind, left)
        short = [name for name, groups in found.items() if len({g.strength for g in groups}) < 2]
        if short:
            commands = [
                f"steppe sweep {self._recipe} --method {name} --search sigma" for name in short
            ]
            raise self._lacks(
                f"two or more strengths of {' and '.join(short)}", "; ".join(commands)
            )
        return {label(parse(name)): groups for name, groups in found.items()}

    def _studies(self) -> dict[str, tuple[str, str, Sequence[Group]]]:
        """By title the two options and the experiments that were given both."""
        pool = self._pool()
        drawn: dict[str, tuple[str, str, Sequence[Group]]] = {}
        commands = []
        for name, (first, second, search) in STUDIES.items():
            groups = [
                g
                for g in pool
                if g.method == name and g.option(first) is not None and g.option(second) is not None
            ]
            if len({(g.option(first), g.option(second)) for g in groups}) > 1:
                drawn[label(parse(name))] = (first, second, groups)
            else:
                commands.append(f"steppe sweep {self._recipe} --method {name} --search {search}")
        if not drawn or (commands and not self.runs):
            raise self._lacks("a sweep over two options", "; ".join(commands))
        return drawn

    def _minima(self) -> dict[str, Figure]:
        """Figures 1 and 5, from analyses stored with the runs."""
        kinds = ("radius",) if self.number == "1" else ("landscape", "spectrum")
        experiments = self._experiments()
        found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        commands = []
        for name, group in experiments.items():
            runs = [Run(r.folder) for r in group.results if r.folder is not None]
            for kind in kinds:
                made = next((s for run in runs if (s := load(run, kind)) is not None), None)
                if made is not None:
                    found[kind][name] = made.result
                elif runs:
                    commands.append((kind, runs[0].name))
        if commands:
            store = "" if self.store == DEFAULT_STORE else f" --store {self.store}"
            grouped = {kind: [n for k, n in commands if k == kind] for kind, _ in commands}
            raise self._lacks(
                f"an analysis ({', '.join(grouped)})",
                "; ".join(f"steppe analyze {k} {' '.join(n)}{store}" for k, n in grouped.items()),
            )
        if self.number == "1":
            return {"": figures.radius_figure(found["radius"])}
        return {
            "landscape": figures.landscape_figure(found["landscape"]),
            "spectrum": figures.spectrum_figure(found["spectrum"]),
        }

    def _lacks(self, what: str, commands: str) -> LabError:
        where = "these runs" if self.runs else f"{self.store}, recipe {self._recipe}"
        return LabError(f"figure {self.number} lacks {what} ({where}). This makes it: {commands}")


def _labelled(row: Row) -> str:
    named = row.strength and row.strength not in row.label
    return f"{row.label} ({row.strength})" if named else row.label


def _same(group: Group, experiment: str) -> bool:
    return group.results[0].config.experiment == experiment


def _readable(run: Run) -> Result | None:
    try:
        return stored(run)
    except LabError:  # a run written by another version
        return None
