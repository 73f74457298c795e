"""The paper's figures from stored runs, or which runs are missing."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from steppe.lab.comparison import Row
from steppe.lab.errors import LabError
from steppe.lab.recipes import recipe
from steppe.lab.results import Result, stored
from steppe.lab.runs import DEFAULT_STORE, Run, Store
from steppe.lab.specs import label, parse
from steppe.lab.statistics import mean_std
from steppe.report import figures
from steppe.report.canvas import SURFACE, error_bars, marked_style, panels, plain_ticks
from steppe.report.pictures import analysis_figure
from steppe.report.sections import mean_curve
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
class Group:
    """The seeds of one experiment."""

    results: tuple[Result, ...]

    @property
    def method(self) -> str:
        return parse(self.results[0].config.method).name

    @property
    def used(self) -> tuple[str, float]:
        """What its strength is (a ratio, sigma, rho) and how large; ("", NaN) where there is none."""
        return self.results[0].strength or ("", math.nan)

    def option(self, name: str) -> float | None:
        """An option of the method where the run was given it; its strength goes by any name."""
        spec = parse(self.results[0].config.method)
        if name == "strength":
            return None if spec.strength is None else spec.strength[1]
        value = spec.options.get(name)
        return float(value) if isinstance(value, int | float) else None

    def scores(self, split: str, metric: str | None = None) -> tuple[float, float]:
        """Mean and standard deviation of a metric, the deciding one by default."""
        name = metric or self.results[0].metric
        return mean_std([result.metrics[split][name] for result in self.results])

    def gap(self) -> float:
        """By how much the training data flatters the deciding metric; below 0 where it does not."""
        rise = self.scores("train")[0] - self.scores("test")[0]
        return rise if self.results[0].higher_is_better else -rise


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

    @property
    def _sweep(self) -> str:
        return f"steppe sweep {self._recipe} --method"

    def _pool(self) -> list[Group]:
        """The runs named, or all of the recipe: any method, any seed, nothing else changed."""
        if self.runs:
            return groups_of(find_results(self.runs, self.store))
        wanted = recipe(self._recipe, "sgd").experiment
        results = filter(None, map(_readable, Store(self.store).runs()))
        return groups_of(
            [r for r in results if r.config.replace(method="sgd").experiment == wanted]
        )

    def _experiments(self) -> dict[str, Group]:
        """One experiment a method, by its label; all of them, or what is missing."""
        pool = self._pool()
        if self.runs:
            rows = compared([result for group in pool for result in group.results]).rows
            return {_labelled(row): Group(row.finished) for row in rows}
        named, missing = {}, []
        for text in self.methods or METHODS[self.number]:
            config = recipe(self._recipe, text)
            same = (g for g in pool if g.results[0].config.experiment == config.experiment)
            group = next(same, None)
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
        kinds = Counter(g.used[0] for g in every)
        kind = max(kinds, key=lambda k: (kinds[k], k), default="")
        drawn = [g for g in every if g.used[0] == kind]
        found = {name: [g for g in drawn if g.method == name] for name in names}
        if others := {k: count for k, count in kinds.items() if k != kind}:
            left = ", ".join(f"{count} by {k}" for k, count in others.items())
            logger.info("figure 3 goes by %s; experiments left out: %s", kind, left)
        short = [name for name, groups in found.items() if len({g.used[1] for g in groups}) < 2]
        if short:
            commands = [f"{self._sweep} {name} --search sigma" for name in short]
            raise self._lacks(f"two or more strengths of {' and '.join(short)}", *commands)
        return {label(parse(name)): groups for name, groups in found.items()}

    def _studies(self) -> dict[str, tuple[str, str, Sequence[Group]]]:
        """By title the two options and the experiments that were given both."""
        pool = self._pool()
        drawn: dict[str, tuple[str, str, Sequence[Group]]] = {}
        commands = []
        for name, (first, second, search) in STUDIES.items():
            same = [g for g in pool if g.method == name]
            groups = [g for g in same if None not in (g.option(first), g.option(second))]
            if len({(g.option(first), g.option(second)) for g in groups}) > 1:
                drawn[label(parse(name))] = (first, second, groups)
            else:
                commands.append(f"{self._sweep} {name} --search {search}")
        if not drawn or (commands and not self.runs):
            raise self._lacks("a sweep over two options", *commands)
        return drawn

    def _minima(self) -> dict[str, Figure]:
        """Figures 1 and 5, from analyses stored with the runs."""
        kinds = ("radius",) if self.number == "1" else ("landscape", "spectrum")
        runs = [
            (name, [Run(r.folder) for r in group.results if r.folder is not None])
            for name, group in self._experiments().items()
        ]
        drawn = {kind: analysis_figure(kind, runs, self.store) for kind in kinds}
        return {"": drawn["radius"]} if self.number == "1" else drawn

    def _lacks(self, what: str, *commands: str) -> LabError:
        where = "these runs" if self.runs else f"{self.store}, recipe {self._recipe}"
        makes = "; ".join(commands)
        return LabError(f"figure {self.number} lacks {what} ({where}). This makes it: {makes}")


def _labelled(row: Row) -> str:
    named = row.strength and row.strength not in row.label
    return f"{row.label} ({row.strength})" if named else row.label


def _readable(run: Run) -> Result | None:
    try:
        return stored(run)
    except LabError:  # a run written by another version
        return None


def groups_of(results: Sequence[Result]) -> list[Group]:
    """Finished results, seeds of one experiment together."""
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        if result.status == "finished":
            found.setdefault(result.config.experiment, {}).setdefault(result.config.seed, result)
    return [Group(tuple(seeds.values())) for seeds in found.values()]


def convergence_figure(groups: Mapping[str, Group]) -> Figure:
    """Figure 2: training loss and test metric by epoch, means over seeds.

    The training loss is that at the true weights where the runs followed it (`track_train`),
    else the one the optimizer saw.
    """
    figure, (left, right) = panels(2, width=4.2)
    example = next(iter(groups.values())).results[0]
    true_loss, tested = f"train_{_loss_name(example)}", f"test_{example.metric}"
    curves = {
        name: [Run(r.folder).metrics for r in group.results if r.folder]
        for name, group in groups.items()
    }
    followed = all(mean_curve(runs, true_loss) for runs in curves.values())
    for i, (name, runs) in enumerate(curves.items()):
        style = {**marked_style(i), "label": f"{name}, n = {len(runs)}"}
        for axis, column in ((left, true_loss if followed else "loss"), (right, tested)):
            points = mean_curve(runs, column)
            every = max(1, len(points) // 8)
            axis.plot([x for x, _ in points], [y for _, y in points], **style, markevery=every)
    left.set_ylabel(f"training loss ({'true' if followed else 'perturbed'} weights)")
    left.set_yscale("log")
    plain_ticks(left.yaxis)
    right.set_ylabel(f"test {example.metric}")
    for axis in (left, right):
        axis.set_xlabel("epoch")
    left.legend(frameon=False)
    return figure


def generalisation_figure(groups: Mapping[str, Sequence[Group]]) -> Figure:
    """Figure 3: gap against final training loss, and test metric, over the strength.

    `groups` has the experiments of each method, one for each strength, all of one kind.
    """
    kinds = sorted({group.used[0] or "none" for found in groups.values() for group in found})
    if len(kinds) > 1:
        raise ValueError(f"Strengths of several kinds cannot share an axis: {', '.join(kinds)}.")
    figure, (left, right) = panels(2, width=4.2)
    for i, (name, found) in enumerate(groups.items()):
        style = marked_style(i)
        example = found[0].results[0]
        ordered = sorted(found, key=lambda g: g.used[1])
        losses = [group.scores("train", _loss_name(example))[0] for group in ordered]
        gaps, strengths = [g.gap() for g in ordered], [g.used[1] for g in ordered]
        left.plot(losses, gaps, **style, label=name)
        for *place, strength in zip(losses, gaps, strengths, strict=True):
            words = {"fontsize": "x-small", "color": style["color"], "textcoords": "offset points"}
            left.annotate(f"{strength:g}", place, xytext=(5, 4 - 12 * (i % 2)), **words)
        means, stds = zip(*(group.scores("test") for group in ordered), strict=True)
        error_bars(right, i, strengths, means, stds, name)
    left.set_xlabel(f"final training loss ({_loss_name(example)})")
    left.set_ylabel(f"gap in {example.metric}, train to test")
    right.set_xlabel(f"{kinds[0]} (bars: standard deviation over seeds)")
    right.set_ylabel(f"test {example.metric}")
    left.legend(frameon=False)
    return figure


def sensitivity_figure(studies: Mapping[str, tuple[str, str, Sequence[Group]]]) -> Figure:
    """Figure 4: the test metric over two options of a method, one panel a study.

    `studies` has, by title, the names of the two options and the experiments.
    """
    import numpy as np

    figure, axes = panels(len(studies), width=4.6, columns=2)
    for axis, (title, (first, second, groups)) in zip(axes, studies.items(), strict=True):
        points = {(g.option(first), g.option(second)): g.scores("test")[0] for g in groups}
        xs, ys = (sorted(set(values)) for values in zip(*points, strict=True))
        grid = np.array([[points.get((x, y), np.nan) for x in xs] for y in ys])
        image = axis.imshow(np.ma.masked_invalid(grid), cmap=SURFACE, origin="lower", aspect="auto")
        dark = np.nanmin(grid) + 0.55 * (np.nanmax(grid) - np.nanmin(grid))
        for (row, column), value in np.ndenumerate(grid):
            words = "–" if np.isnan(value) else f"{value:.2f}"
            colour = "white" if value < dark else "black"
            axis.text(column, row, words, ha="center", va="center", color=colour)
        axis.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
        axis.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
        example = groups[0].results[0]
        axis.set_xlabel(groups[0].used[0] or first if first == "strength" else first)
        axis.set_ylabel(second)
        axis.set_title(f"{title}, n = {min(len(g.results) for g in groups)}")
        figure.colorbar(image, ax=axis, label=f"test {example.metric}")
    return figure


def _loss_name(result: Result) -> str:
    """The metric that is the training loss: NLL for classes, else the one that decides."""
    return "nll" if "nll" in result.metrics["train"] else result.metric
