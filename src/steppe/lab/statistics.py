"""What the seeds say: paired differences, their intervals, and when two methods differ.

Every comparison is paired by seed (same initial weights, same data order), tested with a t-test
on the differences, and corrected by Holm over all comparisons made together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ALPHA = 0.05
ENOUGH = 5
"""Below so many pairs no verdict is given."""

Verdict = Literal["better", "worse", "no difference seen", "too few seeds"]


@dataclass(frozen=True)
class Difference:
    """A paired difference over seeds: mean, interval, p-value and what follows from them.

    `low` and `high` are at the level that Holm's test used for this row, so that an interval
    excludes zero exactly where the verdict says "better" or "worse"; `low95` and `high95` are
    the ordinary 95 % interval of this row alone. `smallest` is the minimum detectable difference:
    the smallest mean that these seeds would have found significant.
    """

    n: int
    mean: float
    std: float
    low: float
    high: float
    low95: float
    high95: float
    p: float
    p_holm: float
    smallest: float
    verdict: Verdict


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for one value, NaN where one is not finite).

    >>> mean_std([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    if not values or not all(map(math.isfinite, values)):
        return statistics.fmean(values) if values else math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def mean_words(values: Sequence[float], mean: str = ".2f", std: str = ".2f") -> str:
    """Mean and standard deviation in these formats; a single value has no spread to show.

    >>> mean_words([1.0, 2.0, 3.0]), mean_words([1.0]), mean_words([])
    ('2.00 ± 1.00', '1.00', '–')
    >>> mean_words([200.0, 526.0], ".3g", ".2g")
    '363 ± 230'
    """
    if not values:
        return "–"
    middle, spread = mean_std(values)
    words = _written_out(middle, mean)
    return f"{words} ± {_written_out(spread, std)}" if len(values) > 1 else words


def _written_out(value: float, form: str) -> str:
    """A number in this format, but 230 where that says 2.3e+02."""
    text = f"{value:{form}}"
    return f"{float(text):.0f}" if "e+" in text else text


def half_width(std: float, n: int, alpha: float = ALPHA) -> float:
    """Half the width of the two-sided t-interval for a mean of n values.

    >>> round(half_width(1.0, 10), 3)
    0.715
    """
    if n < 2:
        return math.inf
    from scipy import stats  # here: `--help` must not wait for it

    return float(stats.t.ppf(1 - alpha / 2, n - 1)) * std / math.sqrt(n)


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of the paired t-test against a mean of zero."""
    mean, std = mean_std(differences)
    if len(differences) < 2 or std == 0:
        return 1.0 if len(differences) < 2 or mean == 0 else 0.0
    from scipy import stats

    return float(stats.ttest_1samp(differences, 0).pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def compare_all(
    differences: Sequence[Sequence[float]], *, higher_is_better: bool = True, alpha: float = ALPHA
) -> list[Difference]:
    """One `Difference` per list of paired differences, corrected by Holm over all of them.

    The row of rank i is tested at alpha / (m - i); the procedure ends at the first row it keeps, and
    all later rows share that row's level.
    """
    ps = [paired_p(values) for values in differences]
    adjusted, order = holm(ps), sorted(range(len(ps)), key=lambda i: ps[i])
    significant = sum(p <= alpha for p in adjusted)
    found = []
    for i, (values, p_holm) in enumerate(zip(differences, adjusted, strict=True)):
        level = alpha / (len(ps) - min(order.index(i), significant))
        n, (mean, std) = len(values), mean_std(values)
        wide, usual = half_width(std, n, level), half_width(std, n, alpha)
        verdict: Verdict = "better" if (mean > 0) == higher_is_better else "worse"
        if n < ENOUGH or p_holm > alpha:
            verdict = "too few seeds" if n < ENOUGH else "no difference seen"
        difference = Difference(
            n=n,
            mean=mean,
            std=std,
            low=mean - wide,
            high=mean + wide,
            low95=mean - usual,
            high95=mean + usual,
            p=ps[i],
            p_holm=p_holm,
            smallest=half_width(std, n, alpha / len(ps)),
            verdict=verdict,
        )
        found.append(difference)
    return found


def equivalent(differences: Sequence[float], margin: float, alpha: float = ALPHA) -> bool:
    """Whether the mean difference lies within ±margin: two one-sided t-tests, at least five pairs.

    "Matches SAM" may be said only where this holds; a missing difference is not equality.

    >>> equivalent([0.1, -0.1, 0.05, 0.0, -0.05], margin=0.5)
    True
    """
    if len(differences) < ENOUGH:
        return False
    mean, std = mean_std(differences)
    wide = half_width(std, len(differences), 2 * alpha)
    return -margin < mean - wide and mean + wide < margin
