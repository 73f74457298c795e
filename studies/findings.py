"""What the lines of a study say: runs by method and seed, and paired differences between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from steppe.lab.results import Result
from steppe.lab.statistics import Difference, compare_all, mean_std
from studies.definitions import Control, Setting, Study
from studies.evidence import Evidence, Line
from studies.plan import Part, Plan, make_plan

HOW = {"defaults": "default strengths, untuned", "tuned": "tuned strengths"}
JUDGED: tuple[Part, ...] = ("defaults", "tuned")
DOUBLED = "ARWP, batch doubled"
PAPER_ORDER = ("sgd", "rwp", "arwp", "sam", "m-rwp", "m-arwp")
"""From the lowest to the highest mean over the paper's twelve columns (a test recomputes it)."""


@dataclass(frozen=True)
class Claim:
    """That one method is better than another, in one setting with one kind of strengths."""

    setting: str
    part: Part
    first: str
    second: str


@dataclass(frozen=True)
class Findings:
    """A study's lines, by what they are there for."""

    study: Study
    evidence: Evidence

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.study, self.evidence)

    @cached_property
    def _index(self) -> dict[tuple[str, Part, str], dict[int, Line]]:
        found: dict[tuple[str, Part, str], dict[int, Line]] = {}
        for entry in self.plan.entries:
            line = self.evidence.find(entry.run)
            if line is not None:
                key = (entry.setting.name, entry.part, entry.name)
                found.setdefault(key, {})[entry.config.seed] = line
        return found

    def lines(self, setting: Setting | str, part: Part, name: str) -> dict[int, Line]:
        """The runs of a row by seed."""
        where = setting if isinstance(setting, str) else setting.name
        return self._index.get((where, part, name), {})

    def finished(self, setting: Setting | str, part: Part, name: str) -> dict[int, Result]:
        """Those that did not diverge."""
        lines = self.lines(setting, part, name).items()
        return {seed: line.result for seed, line in lines if line.result.status == "finished"}

    def names(self, setting: Setting, part: Part) -> list[str]:
        """The rows that have runs, methods first."""
        controls: Sequence[Control] = setting.controls
        if part == "tuned":
            controls = setting.tuned_controls
        wanted = [*map(setting.called, setting.methods), *(control.name for control in controls)]
        return [name for name in wanted if self.lines(setting, part, name)]

    def pairs(self, claim: Claim) -> list[float]:
        """Differences in test accuracy on the seeds that both finished."""
        first = self.finished(claim.setting, claim.part, claim.first)
        second = self.finished(claim.setting, claim.part, claim.second)
        return [first[s].score() - second[s].score() for s in sorted(first.keys() & second.keys())]

    @cached_property
    def differences(self) -> dict[Claim, Difference]:
        """All claims of the study that have a pair of runs, corrected by Holm together."""
        claims: dict[Claim, list[float]] = {}
        for setting, part in itertools.product(self.study.settings, JUDGED):
            for claim in self._claims(setting, part):
                if values := self.pairs(claim):
                    claims[claim] = values
        return dict(zip(claims, compare_all(list(claims.values())), strict=True))

    def _claims(self, setting: Setting, part: Part) -> list[Claim]:
        """Every row against plain training, and what the questions ask."""
        others = [name for name in self.names(setting, part) if name != setting.plain]
        found = [Claim(setting.name, part, name, setting.plain) for name in others]
        asked = [*adaptive(setting), mixing(setting), matching(setting), *ordering(setting)]
        found += [Claim(setting.name, part, first, second) for first, second in asked]
        return list(dict.fromkeys(found))

    def difference(
        self, setting: Setting, part: Part, pair: tuple[str, str]
    ) -> tuple[Claim, Difference | None]:
        """A claim and what is known about it."""
        claim = Claim(setting.name, part, *pair)
        return claim, self.differences.get(claim)

    def mean(self, setting: Setting, part: Part, name: str) -> float:
        """Mean test accuracy of a row."""
        found = self.finished(setting, part, name).values()
        return mean_std([result.score() for result in found])[0]

    def lowest_factor(self, setting: Setting, part: Part, name: str) -> float | None:
        """The smallest median adaptive factor of any epoch and seed."""
        lines = self.lines(setting, part, name).values()
        curves = [line.curves["factor"] for line in lines if line.curves.get("factor")]
        return min(map(min, curves)) if curves else None


def places(findings: Findings) -> Iterator[tuple[Setting, Part, str]]:
    """Every setting with either kind of strengths, and how sentences begin about it."""
    for setting, part in itertools.product(findings.study.settings, JUDGED):
        if findings.names(setting, part):
            yield setting, part, f"{setting.title}, {HOW[part]}"


def adaptive(setting: Setting) -> list[tuple[str, str]]:
    """Does the adaptive form help?"""
    called = setting.called
    return [(called("arwp"), called("rwp")), (called("m-arwp"), called("m-rwp"))]


def mixing(setting: Setting) -> tuple[str, str]:
    """Does mixing help beyond its second batch?"""
    return setting.called("m-arwp"), DOUBLED


def matching(setting: Setting) -> tuple[str, str]:
    """Does m-ARWP match SAM?"""
    return setting.called("m-arwp"), setting.called("sam")


def ordering(setting: Setting) -> list[tuple[str, str]]:
    """The steps of the paper's ordering, each the better one first."""
    present = [method for method in PAPER_ORDER if method in setting.methods]
    return [
        (setting.called(high), setting.called(low)) for low, high in itertools.pairwise(present)
    ]
