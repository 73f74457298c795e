"""What the lines of a study say: runs by method and seed, and paired differences between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from steppe.lab.results import Result
from steppe.lab.specs import parse
from steppe.lab.statistics import Difference, compare_all, mean_std
from studies.definitions import FEW, LARGE, RANDOM, Setting, Study
from studies.evidence import Evidence, Line
from studies.plan import Part, Plan, make_plan

HOW = {"defaults": "default strengths", "tuned": "tuned strengths"}
JUDGED: tuple[Part, ...] = ("defaults", "tuned")
DOUBLED = "ARWP, batch doubled"
PAPER_ORDER = ("sgd", "rwp", "arwp", "sam", "m-rwp", "m-arwp")
"""From the lowest to the highest mean over the paper's twelve columns (a test recomputes it)."""
CHANGES = ("4 bits", "3 bits", "50 % pruned", "80 % pruned")
"""What is done to the final weights, by the names that lines have for the accuracy afterwards."""
UNCHANGED = "none"
"""The accuracy that was measured beside them, with the same BatchNorm statistics."""
OURS = (*FEW[2:], *LARGE)
"""What is compared after them: the default, for safety, and the setting for compression."""
BESIDE = ("rwp", "m-rwp")
"""The defaults of the methods that are shown at that setting; named later, so a family of their own."""
Pair = tuple[str, str]
CLAIMS: dict[str, list[Pair]] = {
    "RWP improves on SGD": [("rwp", "sgd")],
    "The adaptive form helps": [("arwp", "rwp"), ("m-arwp", "m-rwp")],
    "Mixing helps beyond its second batch": [("m-arwp", DOUBLED)],
    "m-ARWP is at or above SAM": [("m-arwp", "sam")],
    "The order of its six methods": [(high, low) for low, high in itertools.pairwise(PAPER_ORDER)],
}
"""What the paper says about accuracy, and the methods whose comparison shows it."""


@dataclass(frozen=True)
class Claim:
    """That one method is better than another, in one setting with one kind of strengths."""

    setting: str
    part: Part
    first: str
    second: str
    after: str = ""
    """The change of the weights after which they are compared; none: as trained."""


@dataclass(frozen=True)
class Row:
    """The runs of a method or control by seed, in one setting with one kind of strengths."""

    part: Part
    name: str
    lines: dict[int, Line]

    @property
    def finished(self) -> dict[int, Result]:
        """Those that did not diverge."""
        every = ((seed, line.result) for seed, line in self.lines.items())
        return {seed: result for seed, result in every if result.status == "finished"}

    def scores(self, after: str = "") -> dict[int, float]:
        """Test accuracy by seed of the runs that finished, as trained or after a change."""
        if not after:
            return {seed: result.score() for seed, result in self.finished.items()}
        measured = {seed: self.lines[seed].minima.get("robustness", {}) for seed in self.finished}
        return {seed: found[after] for seed, found in measured.items() if after in found}

    def mean(self, after: str = "") -> float:
        return mean_std(list(self.scores(after).values()))[0]

    @property
    def strength(self) -> str:
        """`ratio 0.6`; of a tuned baseline its weight decay."""
        config = next(iter(self.lines.values())).result.config
        used = parse(config.method).strength
        if used is not None:
            return f"{used[0]} {used[1]:g}"
        return f"weight decay {config.weight_decay:g}" if self.part == "tuned" else "–"


@dataclass(frozen=True)
class Findings:
    """A study's lines, by what they are there for."""

    study: Study
    evidence: Evidence

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.study, self.evidence)

    @cached_property
    def _rows(self) -> dict[tuple[str, Part, str], Row]:
        found: dict[tuple[str, Part, str], Row] = {}
        for entry in self.plan.entries:
            line = self.evidence.lines.get(entry.run)
            if line is not None:
                key = (entry.setting.name, entry.part, entry.name)
                row = found.setdefault(key, Row(entry.part, entry.name, {}))
                row.lines[entry.config.seed] = line
        return found

    def row(self, setting: Setting | str, part: Part, name: str) -> Row:
        """The runs that a name stands for; maybe none."""
        where = setting if isinstance(setting, str) else setting.name
        return self._rows.get((where, part, name), Row(part, name, {}))

    def rows(self, setting: Setting, part: Part) -> list[Row]:
        """The methods that have runs, then the controls."""
        controls = setting.tuned_controls if part == "tuned" else setting.controls
        methods = (*setting.methods, *(setting.large if part == "defaults" else ()))
        wanted = [*map(setting.called, methods), *(control.name for control in controls)]
        return [row for name in wanted if (row := self.row(setting, part, name)).lines]

    def pairs(self, claim: Claim) -> list[float]:
        """Differences in test accuracy on the seeds that both finished."""
        first, second = (
            self.row(claim.setting, claim.part, name).scores(claim.after)
            for name in (claim.first, claim.second)
        )
        return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]

    @cached_property
    def differences(self) -> dict[Claim, Difference]:
        """All claims that have a pair of runs; Holm corrects the primary ones, those of `BESIDE` and the others apart."""
        primary = [claim for setting in self.study.settings for claim in primary_claims(setting)]
        others = [
            Claim(setting.name, part, *pair)
            for setting, part in itertools.product(self.study.settings, JUDGED)
            for pair in [*self._gains(setting, part), *asked(setting)]
        ]
        beside = [c for each in self.study.settings for c in survival_claims(each, BESIDE)]
        found: dict[Claim, Difference] = {}
        for family in (primary, others, beside):
            known = {c: values for c in family if c not in found and (values := self.pairs(c))}
            found |= zip(known, compare_all(list(known.values())), strict=True)
        return found

    def _gains(self, setting: Setting, part: Part) -> list[Pair]:
        names = [row.name for row in self.rows(setting, part)]
        return [(name, setting.reference(name)) for name in names if name != setting.baseline]

    def gain(self, setting: Setting, row: Row) -> Difference | None:
        """A row against its reference; None for the baseline, and where no pair has run."""
        claim = Claim(setting.name, row.part, row.name, setting.reference(row.name))
        return self.differences.get(claim)

    def gap(self, setting: Setting) -> float:
        """By how many points the baseline is better on training than on test data."""
        base = self.row(setting, "defaults", setting.baseline).finished.values()
        return mean_std([result.score("train") - result.score("test") for result in base])[0]


def primary_claims(setting: Setting) -> Iterator[Claim]:
    """What the primary questions compare: the default strengths, and nothing tuned."""
    _, sam, _, m_arwp = map(setting.called, FEW)
    tried = [setting.called(method) for method in RANDOM if method in setting.methods]
    for name in tried:
        yield Claim(setting.name, "defaults", name, setting.reference(name))
    yield Claim(setting.name, "defaults", m_arwp, sam)
    yield from survival_claims(setting, OURS)


def survival_claims(setting: Setting, methods: Sequence[str]) -> Iterator[Claim]:
    """Methods against SGD and SAM after each change."""
    pairs = itertools.product(map(setting.called, methods), map(setting.called, FEW[:2]))
    for after, (name, other) in itertools.product(CHANGES, pairs):
        yield Claim(setting.name, "defaults", name, other, after)


def asked(setting: Setting) -> list[Pair]:
    """All comparisons between two methods, each once."""
    wanted = [*itertools.chain.from_iterable(CLAIMS.values()), *setting.pairs]
    pairs = [(setting.called(first), setting.called(second)) for first, second in wanted]
    return [pair for pair in dict.fromkeys(pairs) if pair[1] != setting.baseline]
