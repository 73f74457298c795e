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
from steppe.lab.results import Result, by_experiment, readable
from steppe.lab.runs import DEFAULT_STORE, Store
from steppe.lab.specs import label, parse
from steppe.lab.statistics import mean_std
from steppe.report import figures
from steppe.report.canvas import SURFACE, error_bars, marked_style, panels, plain_ticks
from steppe.report.pictures import analysis_figure
from steppe.report.sections import mean_curve
from steppe.report.subjects import compared, find_results, runs_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger("steppe")

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
        usual = "cifar100-resnet18" if self.number in ("2", "3") else "cifar10-resnet18"
        return self.recipe or usual

    @property
    def _sweep(self) -> str:
        return f"steppe sweep {self._recipe} --method"

    def _pool(self) -> list[Row]:
        """The runs named, or all of the recipe: any method, any seed, nothing else changed."""
        if self.runs:
            return experiments(find_results(self.runs, self.store))
        wanted = recipe(self._recipe, "sgd").experiment
        results = readable(Store(self.store))
        same = [r for r in results if r.config.replace(method="sgd").experiment == wanted]
        return experiments(same)

    def _experiments(self) -> dict[str, Row]:
        """One experiment a method, by its label; all of them, or what is missing."""
        pool = self._pool()
        if self.runs:
            rows = compared([result for row in pool for result in row.results]).rows
            return {_labelled(row): row for row in rows}
        by_identity = {row.results[0].config.experiment: row for row in pool}
        wanted = [recipe(self._recipe, text) for text in self.methods or METHODS[self.number]]
        if missing := [c.method for c in wanted if c.experiment not in by_identity]:
            follow = " --track-train" if self.number == "2" else ""
            raise self._lacks(
                f"runs of {', '.join(missing)}",
                f"steppe compare {' '.join(missing)} --recipe {self._recipe}{follow}",
            )
        return {(row := by_identity[config.experiment]).label: row for config in wanted}

    def _ranges(self) -> dict[str, list[Row]]:
        """By method the experiments over its strength, at least two."""
        pool = self._pool()
        names = [parse(text).name for text in self.methods or METHODS["3"]]
        every = [row for row in pool if parse(row.spec).name in names]
        # A sigma and a ratio cannot share an axis: the kind with most experiments is drawn.
        kinds = Counter(strength(row)[0] for row in every)
        kind = max(kinds, key=lambda k: (kinds[k], k), default="")
        drawn = [row for row in every if strength(row)[0] == kind]
        found = {name: [row for row in drawn if parse(row.spec).name == name] for name in names}
        if others := {k: count for k, count in kinds.items() if k != kind}:
            left = ", ".join(f"{count} by {k}" for k, count in others.items())
            logger.info("figure 3 goes by %s; experiments left out: %s", kind, left)
        short = [name for name, rows in found.items() if len(set(map(strength, rows))) < 2]
        if short:
            commands = [f"{self._sweep} {name} --search sigma" for name in short]
            raise self._lacks(f"two or more strengths of {' and '.join(short)}", *commands)
        return {label(parse(name)): rows for name, rows in found.items()}

    def _studies(self) -> dict[str, tuple[str, str, Sequence[Row]]]:
        """By title the two options and the experiments that were given both."""
        pool = self._pool()
        drawn: dict[str, tuple[str, str, Sequence[Row]]] = {}
        commands = []
        for name, (first, second, search) in STUDIES.items():
            same = [row for row in pool if parse(row.spec).name == name]
            rows = [row for row in same if None not in (option(row, first), option(row, second))]
            if len({(option(row, first), option(row, second)) for row in rows}) > 1:
                drawn[label(parse(name))] = (first, second, rows)
            else:
                commands.append(f"{self._sweep} {name} --search {search}")
        if not drawn or (commands and not self.runs):
            raise self._lacks("a sweep over two options", *commands)
        return drawn

    def _minima(self) -> dict[str, Figure]:
        """Figures 1 and 5, from analyses stored with the runs."""
        runs = [(name, runs_of(row)) for name, row in self._experiments().items()]
        if self.number == "1":
            return {"": analysis_figure("radius", runs, self.store)}
        return {k: analysis_figure(k, runs, self.store) for k in ("landscape", "spectrum")}

    def _lacks(self, what: str, *commands: str) -> LabError:
        where = "these runs" if self.runs else f"{self.store}, recipe {self._recipe}"
        makes = "; ".join(commands)
        return LabError(f"figure {self.number} lacks {what} ({where}). This makes it: {makes}")


def _labelled(row: Row) -> str:
    named = row.strength and row.strength not in row.label
    return f"{row.label} ({row.strength})" if named else row.label


def experiments(results: Sequence[Result]) -> list[Row]:
    """Finished results, seeds of one experiment together."""
    rows = []
    finished = (result for result in results if result.status == "finished")
    for seeds in by_experiment(finished).values():
        config = next(iter(seeds.values())).config
        name = label(parse(config.method), config.optimizer)
        rows.append(Row(config.method, name, "", tuple(seeds.values())))
    return rows


def strength(row: Row) -> tuple[str, float]:
    """What its strength is (a ratio, sigma, rho) and how large; ("", NaN) where there is none."""
    return row.results[0].strength or ("", math.nan)


def option(row: Row, name: str) -> float | None:
    """An option of the method where the run was given it; its strength goes by any name."""
    spec = parse(row.spec)
    if name == "strength":
        return None if spec.strength is None else spec.strength[1]
    value = spec.options.get(name)
    return float(value) if isinstance(value, int | float) else None


def convergence_figure(rows: Mapping[str, Row]) -> Figure:
    """Figure 2: training loss and test metric by epoch, means over seeds.

    The training loss is that at the true weights where the runs followed it (`track_train`),
    else the one the optimizer saw.
    """
    figure, (left, right) = panels(2, width=4.2)
    example = next(iter(rows.values())).finished[0]
    true_loss, tested = f"train_{_loss_name(example)}", f"test_{example.metric}"
    curves = {name: [run.metrics for run in runs_of(row)] for name, row in rows.items()}
    followed = all(mean_curve(runs, true_loss) for runs in curves.values())
    for i, (name, runs) in enumerate(curves.items()):
        style = {**marked_style(i), "label": f"{name}, n = {len(runs)}"}
        for axis, column in ((left, true_loss if followed else "loss"), (right, tested)):
            points = mean_curve(runs, column)
            every = max(1, len(points) // 8)
            axis.plot([x for x, _ in points], [y for _, y in points], **style, markevery=every)
    seen = f"training loss ({'true' if followed else 'perturbed'} weights)"
    left.set(xlabel="epoch", ylabel=seen, yscale="log")
    plain_ticks(left.yaxis)
    right.set(xlabel="epoch", ylabel=f"test {example.metric}")
    left.legend(frameon=False)
    return figure


def generalisation_figure(methods: Mapping[str, Sequence[Row]]) -> Figure:
    """Figure 3: gap against final training loss, and test metric, over the strength.

    `methods` has the experiments of each method, one for each strength, all of one kind.
    """
    kinds = sorted({strength(row)[0] or "none" for found in methods.values() for row in found})
    if len(kinds) > 1:
        raise ValueError(f"Strengths of several kinds cannot share an axis: {', '.join(kinds)}.")
    figure, (left, right) = panels(2, width=4.2)
    for i, (name, found) in enumerate(methods.items()):
        style = marked_style(i)
        example = found[0].results[0]
        ordered = sorted(found, key=strength)
        losses = [mean_std(row.values("train", _loss_name(example)))[0] for row in ordered]
        gaps = [mean_std(row.gaps())[0] for row in ordered]
        strengths = [strength(row)[1] for row in ordered]
        left.plot(losses, gaps, **style, label=name)
        for *place, used in zip(losses, gaps, strengths, strict=True):
            words = {"fontsize": "x-small", "color": style["color"], "textcoords": "offset points"}
            left.annotate(f"{used:g}", place, xytext=(5, 4 - 12 * (i % 2)), **words)
        means, stds = zip(
            *(mean_std(row.values("test", example.metric)) for row in ordered), strict=True
        )
        error_bars(right, i, strengths, means, stds, name)
    loss = f"final training loss ({_loss_name(example)})"
    left.set(xlabel=loss, ylabel=f"gap in {example.metric}, train to test")
    bars = f"{kinds[0]} (bars: standard deviation over seeds)"
    right.set(xlabel=bars, ylabel=f"test {example.metric}")
    left.legend(frameon=False)
    return figure


def sensitivity_figure(studies: Mapping[str, tuple[str, str, Sequence[Row]]]) -> Figure:
    """Figure 4: the test metric over two options of a method, one panel a study.

    `studies` has, by title, the names of the two options and the experiments.
    """
    import numpy as np

    figure, axes = panels(len(studies), width=4.6, columns=2)
    for axis, (title, (first, second, rows)) in zip(axes, studies.items(), strict=True):
        metric = rows[0].results[0].metric
        means = [mean_std(row.values("test", metric))[0] for row in rows]
        places = [(option(row, first), option(row, second)) for row in rows]
        points = dict(zip(places, means, strict=True))
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
        across = strength(rows[0])[0] or first if first == "strength" else first
        seeds = f"{title}, n = {min(len(row.results) for row in rows)}"
        axis.set(xlabel=across, ylabel=second, title=seeds)
        figure.colorbar(image, ax=axis, label=f"test {metric}")
    return figure


def _loss_name(result: Result) -> str:
    """The metric that is the training loss: NLL for classes, else the one that decides."""
    return "nll" if "nll" in result.metrics["train"] else result.metric
