"""What is left after each change: curves over sizes, from one result or from one a seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from steppe.analysis import Robustness
from steppe.lab.statistics import half_width, mean_std

Point = tuple[float, float, float]
"""The size of a change, the metric, and half of its interval."""
Curves = dict[str, list[Point]]
AXES = {
    "rounding": "bits",
    "pruning": "share pruned",
    "2:4 pruning": "share pruned, 2:4",
    "weight noise": "weight noise, ratio",
    "input noise": "input noise, standard deviations",
    "blur": "blur, pixels",
    "contrast": "contrast, factor",
}
UNCHANGED = {kind: 0.0 for kind in AXES if kind != "rounding"} | {"contrast": 1.0}
"""The size at which a change is none; no number of bits is."""
BACKWARDS = ("bits", "contrast")
"""Changes that are the stronger the smaller their number."""


def unchanged_at(panel: str) -> float | None:
    """The size at which a panel shows the unchanged model."""
    return next(
        (UNCHANGED.get(kind) for kind, axis in AXES.items() if panel.startswith(axis)), None
    )


Groups = Mapping[int, Sequence[Robustness]]
"""Results by the number of their row."""


def measured_alike(result: Robustness) -> tuple[object, ...]:
    """What two results must share to be averaged or compared."""
    changes = (result.kinds, result.schemes, result.sizes, result.statistics, result.include)
    return (*changes, result.origin["samples"])


def has_accuracy(results: Iterable[Robustness]) -> bool:
    """Whether all of them know an accuracy; else curves show the loss."""
    return not any(bool(one.accuracy.isnan().all()) for one in results)


def shared_curves(groups: Groups) -> tuple[bool, dict[int, dict[str, Curves]]] | None:
    """Whether they have an accuracy, and the curves of each row; None if not measured alike."""
    every = [one for group in groups.values() for one in group]
    if len({measured_alike(one) for one in every}) != 1:
        return None
    accuracy = has_accuracy(every)
    return accuracy, {row: survival_curves(group, accuracy) for row, group in groups.items()}


def survival_curves(group: Sequence[Robustness], accuracy: bool = True) -> dict[str, Curves]:
    """By statistics and panel: accuracy in per cent (or the loss) at each size of a change.

    The half widths are 95 % t-intervals over several results, or the spread over draws of one.
    """
    found: dict[str, Curves] = {}
    first = group[0]
    for s, statistics in enumerate(first.statistics):
        curves: Curves = {}
        for c, (kind, scheme) in enumerate(zip(first.kinds, first.schemes, strict=True)):
            if kind in AXES:
                panel = AXES[kind] + (f", {scheme}" if scheme else "")
                if panel not in curves and kind in UNCHANGED:
                    curves[panel] = [(UNCHANGED[kind], *_middle(group, s, 0, accuracy))]
                point = (first.sizes[c], *_middle(group, s, c, accuracy))
                curves.setdefault(panel, []).append(point)
        found[statistics] = {panel: sorted(points) for panel, points in curves.items()}
    return found


def _middle(group: Sequence[Robustness], s: int, c: int, accuracy: bool) -> tuple[float, float]:
    scale = 100.0 if accuracy else 1.0
    values = [scale * float((r.accuracy if accuracy else r.loss)[s, c]) for r in group]
    mean, std = mean_std(values)
    if len(values) > 1:
        return mean, half_width(std, len(values))
    spread = scale * float(group[0].spread("accuracy" if accuracy else "loss")[s, c])
    return mean, 0.0 if math.isnan(spread) else spread
