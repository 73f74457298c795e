"""A study that confirms defaults: what it could see, and whether each is equivalent to its reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats

from steppe.lab.statistics import ALPHA, half_width, mean_std, mean_words
from steppe.lab.tables import Table, join_words, signed
from studies.comparisons import Compared, compared
from studies.definitions import METHODS
from studies.findings import Findings

POWER = 0.8


def detectable(std: float, n: int) -> float:
    """The mean difference seen with 80 % power at the 5 % level if seeds vary by `std` and pairing
    takes nothing of it away.

    >>> round(detectable(1.0, 20), 2)
    0.93
    """
    level, power = (float(stats.t.ppf(q, n - 1)) for q in (1 - ALPHA / 2, POWER))
    return (level + power) * std * math.sqrt(2 / n)


def judged(findings: Findings) -> list[tuple[Compared, str]]:
    """Every method at its default strength against its reference, and the verdict.

    Equivalent where two one-sided tests say so; else what Holm's test says of the difference.
    """
    margin = findings.study.margin
    if margin is None:
        return []
    found: list[tuple[Compared, str]] = []
    for each in compared([findings], [(method, "") for method in METHODS[1:]]):
        decided = each.difference.verdict in ("better", "worse")
        verdict = each.difference.verdict if decided else "inconclusive"
        found.append((each, "equivalent" if each.equivalent(margin) else verdict))
    return found


def power_table(findings: Findings) -> Table | None:
    """The smallest difference that each setting could show; None in other studies."""
    if findings.study.margin is None:
        return None
    rows = []
    for setting in findings.study.settings:
        base = findings.row(setting, "defaults", setting.baseline)
        scores = list(base.scores().values())
        if len(scores) > 1:
            found = detectable(mean_std(scores)[1], len(scores))
            rows.append((setting.title, mean_words(scores), str(len(scores)), f"{found:.2f}"))
    note = (
        "From the number of seeds and the spread of the baseline over them: the difference found with "
        f"{POWER:.0%} power by a t-test at the 5 % level, as if seeds were not paired."
    )
    header = ("setting", "baseline, %", "n", "minimum detectable difference, points")
    return Table(header, tuple(rows), "What could be seen", (note,)) if rows else None


def verdict_table(findings: Findings) -> Table | None:
    """Every method against its reference, with the verdict by equivalence; None in other studies."""
    rows = []
    for each, verdict in judged(findings):
        mean, std = mean_std(findings.pairs(each.claim))
        wide = half_width(std, each.difference.n, 2 * ALPHA)
        rows.append(
            (
                each.setting.title,
                f"{each.claim.first} − {each.claim.second}",
                f"{signed(mean)} [{signed(mean - wide)}, {signed(mean + wide)}]",
                verdict,
                str(each.difference.n),
            )
        )
    note = (
        f"*Equivalent*: two one-sided t-tests at the 5 % level within {findings.study.margin or 0:g} point, that "
        "is, the 90 % interval shown lies inside. *Better*, *worse*: beyond that, and significant by Holm's "
        "test. *Inconclusive*: neither."
    )
    header = ("setting", "compared", "points [90 % interval]", "verdict", "n")
    return Table(header, tuple(rows), "Verdict", (note,)) if rows else None


def verdict_words(found: Sequence[Findings]) -> list[str]:
    """A sentence for each study that confirms defaults and has verdicts."""
    sentences = []
    for findings in found:
        study, every = findings.study, judged(findings)
        verdicts = [verdict for _, verdict in every]
        kinds = ("equivalent", "better", "inconclusive", "worse")
        lost = [
            f"{each.claim.first} on {each.setting.title} ({signed(each.difference.mean)})"
            for each, verdict in every
            if verdict == "worse"
        ]
        if every:
            sentences.append(
                f"[{study.title}](evidence/{study.name}.md), by equivalence within {study.margin or 0:g} point: of "
                f"{len(every)} comparisons {join_words([f'{verdicts.count(kind)} {kind}' for kind in kinds])}"
                f"{f': {join_words(lost)}' if lost else ''}."
            )
    return sentences
