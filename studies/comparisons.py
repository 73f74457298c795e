"""Comparisons over all studies: at default strengths, in trials, and of defaults that have gone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steppe.lab.specs import parse
from steppe.lab.statistics import ENOUGH, Difference, compare_all, equivalent, mean_std
from studies.definitions import METHODS, RANDOM, Setting, Study
from studies.evidence import Evidence, Line, archives
from studies.findings import Claim, Findings, Pair
from studies.plan import Part

MARGIN = 0.5
"""Points of accuracy within which two methods match."""
Pairs = Callable[[Setting], Sequence[Pair]]


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

    @property
    def equivalent(self) -> bool:
        """Whether they are the same within the margin; a missing difference is not enough."""
        return equivalent(self.findings.pairs(self.claim), MARGIN)


def place_of(study: Study, setting: Setting) -> str:
    """`Digits (MLP, clean labels)`"""
    return f"{study.title} ({setting.title})"


def compared(
    found: Sequence[Findings], pairs: Pairs, after: str = "", part: Part = "defaults"
) -> list[Compared]:
    """The pairs of all settings that have seeds enough."""
    made = []
    for findings in found:
        for setting in findings.study.settings:
            for pair in pairs(setting):
                claim = Claim(setting.name, part, *pair, after)
                difference = findings.differences.get(claim)
                if difference is not None and difference.n >= ENOUGH:
                    made.append(Compared(findings, setting, claim, difference))
    return made


def random_gains(setting: Setting) -> list[Pair]:
    """The methods of random perturbation against the baseline, mixed ones on its two batches if it has them."""
    names = map(setting.called, RANDOM)
    return [(name, setting.reference(name)) for name in names]


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
        for setting in findings.study.settings:
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
                made = {value: mean_std(tried[value])[0] - usual for value in sorted(tried)}
                gains[place_of(findings.study, setting)] = made
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


def refuted(folder: Path, studies: Iterable[Study]) -> list[str]:
    """For each archive a sentence on the default in it that cost most accuracy."""
    by_name = {study.name: study for study in studies}
    sentences = []
    for name, files in archives(folder).items():
        known = [old for old in files if old.study in by_name]
        lost = [each for old in known for each in _lost(folder, old, by_name[old.study])]
        if lost:
            difference, words = min(lost, key=lambda each: each[0].mean)
            sentences.append(
                f"An earlier default was refuted: {words} cost {-difference.mean:.1f} points of "
                f"accuracy (n = {difference.n}, lines in `evidence/archive/{name}`)."
            )
    return sentences


def _lost(folder: Path, old: Evidence, study: Study) -> list[tuple[Difference, str]]:
    """What the archived default rows of a study lost against its baseline."""
    rows, current = _default_rows(old), _default_rows(Evidence(folder, old.study))
    found: dict[str, list[float]] = {}
    for setting in study.settings:
        key = (setting.name, setting.baseline)
        base = current.get(key, {}) | rows.get(key, {})
        for name in map(setting.called, METHODS[1:]):
            row = rows.get((setting.name, name), {})
            if seeds := sorted(row.keys() & base.keys()):
                kind, value = row[seeds[0]].result.strength or ("strength", math.nan)
                words = f"{name} with {kind} {value:g} on {place_of(study, setting)}"
                found[words] = [row[s].result.score() - base[s].result.score() for s in seeds]
    made = zip(compare_all(list(found.values())), found, strict=True)
    return [each for each in made if each[0].verdict == "worse"]


def _default_rows(evidence: Evidence) -> dict[tuple[str, str], dict[str, Line]]:
    """By setting and row the finished runs at default strengths, by seed, as their labels say."""
    rows: dict[tuple[str, str], dict[str, Line]] = {}
    for line in evidence.lines.values():
        what, _, seed = line.label.rpartition(" seed ")
        setting, part, name = what.split(" ", 2)
        if part == "defaults" and line.result.status == "finished":
            rows.setdefault((setting, name), {})[seed] = line
    return rows
