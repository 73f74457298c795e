"""Comparisons over all studies: at default strengths, in trials, and of defaults that have gone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from steppe.lab.specs import parse
from steppe.lab.statistics import ENOUGH, Difference, compare_all, equivalent, mean_std
from studies.definitions import RANDOM, Setting, Study
from studies.evidence import Evidence, archives
from studies.findings import Claim, Findings, Pair

MARGIN = 0.5
"""Points of accuracy within which two methods match."""
MATCH = [("m-arwp", "sam")]
RANDOM_GAINS = [(method, "") for method in RANDOM]
"""The methods of random perturbation against the baseline, mixed ones on its two batches if it has them."""


@dataclass(frozen=True)
class Compared:
    """Two methods in one setting, on seeds enough for a verdict."""

    findings: Findings
    setting: Setting
    claim: Claim
    difference: Difference

    @property
    def place(self) -> str:
        return place_of(self.findings.study, self.setting)

    def equivalent(self, margin: float = MARGIN) -> bool:
        """Whether they are the same within the margin; a missing difference is not enough."""
        return equivalent(self.findings.pairs(self.claim), margin)


def place_of(study: Study, setting: Setting) -> str:
    """`Digits (MLP, clean labels)`"""
    return f"{study.title} ({setting.title})"


def places(found: Sequence[Findings]) -> Iterator[tuple[str, Findings, Setting]]:
    """Every setting of all studies, with its name."""
    for findings in found:
        for setting in findings.study.settings:
            yield place_of(findings.study, setting), findings, setting


def compared(found: Sequence[Findings], pairs: Sequence[Pair], after: str = "") -> list[Compared]:
    """These methods at default strengths (no second one: the reference) wherever there are seeds enough."""
    made = []
    for (_, findings, setting), (method, other) in itertools.product(places(found), pairs):
        first = setting.called(method)
        second = setting.called(other) if other else setting.reference(first)
        claim = Claim(setting.name, "defaults", first, second, after)
        difference = findings.differences.get(claim)
        if difference is not None and difference.n >= ENOUGH:
            made.append(Compared(findings, setting, claim, difference))
    return made


Gains = dict[str, dict[float, float]]
"""By place and strength the points of validation accuracy gained over the baseline."""


@dataclass(frozen=True)
class Fixed:
    """One strength for all settings, and where it does worst."""

    value: float
    gain: float
    place: str


def trial_gains(found: Sequence[Findings], unit: str, method: str = "rwp") -> Gains:
    """What trials found for a method's strengths in this unit, archived ones included."""
    gains: Gains = {}
    for findings in found:
        folder, name = findings.evidence.folder, findings.study.name
        old = [each for files in archives(folder).values() for each in files if each.study == name]
        lines = [line for each in (findings.evidence, *old) for line in each.lines.values()]
        for place, _, setting in places([findings]):
            base: list[float] = []
            tried: dict[float, list[float]] = {}
            for line in lines:
                if line.label.split()[:2] != [setting.name, "tuning"]:
                    continue
                config, finished = line.result.config, line.result.status == "finished"
                score = line.result.score("validation") if finished else -math.inf
                spec = parse(config.method)
                if spec.name == "sgd" and config.weight_decay == setting.config.weight_decay:
                    base.append(score)
                elif spec.name == method and spec.strength and spec.strength[0] == unit:
                    tried.setdefault(spec.strength[1], []).append(score)
            if base and tried:
                usual = mean_std(base)[0]
                gains[place] = {value: mean_std(tried[value])[0] - usual for value in sorted(tried)}
    return gains


def best_fixed(gains: Gains) -> Fixed | None:
    """Of the strengths tried in all settings the one whose worst gain is the highest."""
    if not gains:
        return None
    worst = []
    for value in set.intersection(*(set(each) for each in gains.values())):
        place = min(gains, key=lambda place: gains[place][value])
        worst.append(Fixed(value, gains[place][value], place))
    return max(worst, key=lambda each: (each.gain, -each.value), default=None)


def refuted(folder: Path) -> list[str]:
    """For each archive a sentence on the default in it that cost most accuracy."""
    sentences = []
    for name, files in archives(folder).items():
        gains: dict[str, list[float]] = {}
        for old in files:
            gains |= _archived_gains(old, Evidence(folder, old.study))
        made = zip(compare_all(list(gains.values())), gains, strict=True)
        if lost := [each for each in made if each[0].verdict == "worse"]:
            difference, words = min(lost, key=lambda each: each[0].mean)
            sentences.append(
                f"An earlier default was refuted: {words} cost {-difference.mean:.1f} points of "
                f"accuracy (n = {difference.n}, lines in `evidence/archive/{name}`)."
            )
    return sentences


def _archived_gains(old: Evidence, current: Evidence) -> dict[str, list[float]]:
    """What archived rows at default strengths gained over the baseline, seed by seed."""
    base: dict[tuple[str, int], float] = {}
    gains: dict[str, list[float]] = {}
    lines = [*current.lines.values(), *old.lines.values()]
    for line in sorted(lines, key=lambda line: line.result.strength is not None):
        result, (setting, part, name) = line.result, line.label.split(" ", 2)
        if part == "defaults" and result.status == "finished" and not {",", "("} & {*name}:
            if result.strength is None:
                base[setting, result.config.seed] = result.score()
            elif line.run in old.lines and (setting, result.config.seed) in base:
                kind, value = result.strength
                method = name.partition(" seed ")[0]
                words = f"{method} with {kind} {value:g} on {result.config.data} (`{setting}`)"
                gain = result.score() - base[setting, result.config.seed]
                gains.setdefault(words, []).append(gain)
    return gains
