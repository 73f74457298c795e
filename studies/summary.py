"""The page's questions over all studies: how often which answer was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steppe.lab.statistics import ENOUGH, Difference
from steppe.lab.tables import Table, signed
from studies.answers import MARGIN, matches
from studies.definitions import Setting
from studies.findings import (
    DOUBLED,
    Claim,
    Findings,
    adaptive,
    matching,
    mixing,
    ordering,
    places,
)
from studies.flatness import ranking

Pairs = Callable[[Setting], Sequence[tuple[str, str]]]
NOTE = (
    f"All comparisons with {ENOUGH} seeds or more, at default and at tuned strengths; where both are "
    "the same runs they count once. The means are in points; each study has the intervals below."
)


@dataclass(frozen=True)
class Told:
    """A comparison with seeds enough for a verdict."""

    findings: Findings
    claim: Claim
    difference: Difference


def summary_table(found: Sequence[Findings]) -> Table | None:
    """A row for each question that is a comparison of methods; None where nothing is told yet."""
    asked: dict[str, tuple[str, Pairs]] = {
        "Do the methods gain?": ("each − plain training", _gaining),
        "Does the adaptive form help?": ("ARWP − RWP, m-ARWP − m-RWP", adaptive),
        "Does mixing help beyond its second batch?": (f"m-ARWP − {DOUBLED}", _one(mixing)),
        "Does m-ARWP match SAM?": ("m-ARWP − SAM", _one(matching)),
        "Is the ordering the paper's?": ("each − the one below it in the paper", ordering),
    }
    rows = []
    for question, (what, pairs) in asked.items():
        if told := compared(found, pairs):
            rows.append((question, what, *_counts(told)))
    if not rows:
        return None
    header = ("question", "compared", "better", "worse", "no difference seen", "all", "means")
    notes = (NOTE, *_matches(found), *_flatness(found))
    return Table(header, tuple(rows), notes=(" ".join(notes),))


def compared(found: Sequence[Findings], pairs: Pairs) -> list[Told]:
    """Every comparison once: where the trials chose the defaults, tuned runs are the same runs."""
    told: dict[tuple[frozenset[str], ...], Told] = {}
    for findings in found:
        for setting, part, _ in places(findings):
            for pair in pairs(setting):
                claim, difference = findings.difference(setting, part, pair)
                if difference is None or difference.n < ENOUGH:
                    continue
                rows = [findings.lines(setting, part, name).values() for name in pair]
                runs = tuple(frozenset(line.run for line in row) for row in rows)
                told.setdefault(runs, Told(findings, claim, difference))
    return list(told.values())


def _gaining(setting: Setting) -> list[tuple[str, str]]:
    names = map(setting.called, setting.methods)
    return [(name, setting.plain) for name in names if name != setting.plain]


def _one(pair: Callable[[Setting], tuple[str, str]]) -> Pairs:
    return lambda setting: [pair(setting)]


def _counts(told: list[Told]) -> list[str]:
    verdicts = Counter(each.difference.verdict for each in told)
    means = [each.difference.mean for each in told]
    counts = [verdicts["better"], verdicts["worse"], verdicts["no difference seen"], len(told)]
    return [*map(str, counts), f"{signed(min(means))} to {signed(max(means))}"]


def _matches(found: Sequence[Findings]) -> list[str]:
    told = compared(found, _one(matching))
    if not told:
        return []
    count = sum(matches(each.findings, each.claim) for each in told)
    return [f"m-ARWP and SAM are equivalent within {MARGIN:g} points in {count} of {len(told)}."]


def _flatness(found: Sequence[Findings]) -> list[str]:
    ranks = [
        ranking(findings, setting, part, "largest_eigenvalue")
        for findings in found
        for setting, part, _ in places(findings)
    ]
    known = [each for each in ranks if each is not None and each.seeds >= ENOUGH]
    if not known:
        return []
    same = sum(each.flattest == each.best for each in known)
    return [
        "The method with the smallest mean of the largest Hessian eigenvalue has the highest mean "
        f"accuracy in {same} of {len(known)} tables of minima."
    ]
