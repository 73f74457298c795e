"""Static figures of training: convergence (Figure 2), trade-off (3), sensitivity (4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from steppe.lab.results import Result
from steppe.lab.runs import Run
from steppe.lab.specs import parse
from steppe.lab.statistics import mean_std
from steppe.report.canvas import SURFACE, line_style, panels, plain_ticks
from steppe.report.sections import mean_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = "osd^vP*"


@dataclass(frozen=True)
class Group:
    """The seeds of one experiment."""

    results: tuple[Result, ...]

    @property
    def method(self) -> str:
        return parse(self.results[0].config.method).name

    @property
    def strength(self) -> float:
        used = self.results[0].strength
        return math.nan if used is None else used[1]

    @property
    def kind(self) -> str:
        """What its strength is: a ratio, sigma, rho; empty where there is none."""
        used = self.results[0].strength
        return "" if used is None else used[0]

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
        style: dict[str, Any] = {**line_style(i), "marker": MARKS[i % len(MARKS)]}
        label = f"{name}, n = {len(runs)}"
        for axis, column in ((left, true_loss if followed else "loss"), (right, tested)):
            epochs, values = _xy(mean_curve(runs, column))
            axis.plot(epochs, values, **style, markevery=max(1, len(epochs) // 8), label=label)
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
    kinds = sorted({group.kind or "none" for found in groups.values() for group in found})
    if len(kinds) > 1:
        raise ValueError(f"Strengths of several kinds cannot share an axis: {', '.join(kinds)}.")
    figure, (left, right) = panels(2, width=4.2)
    for i, (name, found) in enumerate(groups.items()):
        ordered = sorted(found, key=lambda group: group.strength)
        style: dict[str, Any] = {**line_style(i), "marker": MARKS[i % len(MARKS)]}
        example = ordered[0].results[0]
        losses = [group.scores("train", _loss_name(example))[0] for group in ordered]
        gaps = [group.gap() for group in ordered]
        left.plot(losses, gaps, **style, label=name)
        for loss, gap, group in zip(losses, gaps, ordered, strict=True):
            left.annotate(
                f"{group.strength:g}",
                (loss, gap),
                xytext=(5, 4 - 12 * (i % 2)),
                textcoords="offset points",
                fontsize="x-small",
                color=style["color"],
            )
        means, stds = zip(*(group.scores("test") for group in ordered), strict=True)
        strengths = [group.strength for group in ordered]
        right.errorbar(strengths, means, yerr=stds, **style, capsize=2, label=name)
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
        points = {(group.option(first), group.option(second)): group for group in groups}
        xs = sorted({key[0] for key in points if key[0] is not None})
        ys = sorted({key[1] for key in points if key[1] is not None})
        grid = np.full((len(ys), len(xs)), np.nan)
        for (a, b), group in points.items():
            if a is not None and b is not None:
                grid[ys.index(b), xs.index(a)] = group.scores("test")[0]
        image = axis.imshow(np.ma.masked_invalid(grid), cmap=SURFACE, origin="lower", aspect="auto")
        dark = np.nanmin(grid) + 0.55 * (np.nanmax(grid) - np.nanmin(grid))
        for (row, column), value in np.ndenumerate(grid):
            words = "–" if np.isnan(value) else f"{value:.2f}"
            colour = "white" if value < dark else "black"
            axis.text(column, row, words, ha="center", va="center", color=colour)
        axis.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
        axis.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
        example = next(iter(points.values())).results[0]
        kind = example.strength[0] if example.strength else "strength"
        axis.set_xlabel(kind if first == "strength" else first)
        axis.set_ylabel(second)
        axis.set_title(f"{title}, n = {min(len(g.results) for g in groups)}")
        figure.colorbar(image, ax=axis, label=f"test {example.metric}")
    return figure


def _loss_name(result: Result) -> str:
    """The metric that is the training loss: NLL for classes, else the one that decides."""
    return "nll" if "nll" in result.metrics["train"] else result.metric


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
