"""The plan of a study: which runs it consists of, in which order, and which of them are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, get_args

from steppe.lab.config import Config
from steppe.lab.engines import Job, passes
from steppe.lab.results import Result
from steppe.lab.specs import Spec, parse
from steppe.lab.tuning import Choice, tune_all
from studies.definitions import Control, Setting, Study
from studies.evidence import Evidence

Part = Literal["defaults", "tuning", "tuned"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Entry:
    """One run of a study, and what it is there for; several entries may share a run."""

    setting: Setting
    part: Part
    name: str
    """The method or control, and which variant of it."""
    config: Config

    @cached_property
    def run(self) -> str:
        """The identity of its run."""
        return self.config.identity

    @property
    def robust(self) -> bool:
        """Whether its model is measured after compression."""
        return self.part == "defaults" and self.name in self.setting.compressed

    @property
    def label(self) -> str:
        """What the progress display calls it."""
        return f"{self.setting.name} {self.part} {self.name} seed {self.config.seed}"

    @property
    def seconds(self) -> float:
        """The estimated time on one core."""
        base = self.setting.config
        steps = (self.config.steps or 1) / (base.steps or 1)
        return self.setting.seconds * passes(self.config) * steps * self.config.batch / base.batch


@dataclass(frozen=True)
class Plan:
    """All entries that are known; `waiting` tuned runs will be known when their trials are done."""

    study: Study
    entries: tuple[Entry, ...]
    waiting: tuple[Entry, ...]
    """The same runs with the default strength in place of the one to be found."""
    choices: dict[str, dict[str, Choice]]
    """By setting and method the tuned strength, where the trials are done."""

    def of(self, setting: Setting, part: Part) -> list[Entry]:
        return [e for e in self.entries if e.setting.name == setting.name and e.part == part]

    def missing(
        self, evidence: Evidence, take: Callable[[Sequence[Entry]], list[Entry]] = list
    ) -> list[Entry]:
        """The entries (of those that `take` leaves) whose runs have no line yet, or none with what they
        are to show, each run once: a tuned run may be a default one too."""
        found: dict[str, Entry] = {}
        for entry in take(self.entries):
            line = evidence.lines.get(entry.run)
            if line is None or (entry.robust and not line.complete):
                found.setdefault(entry.run, entry)
        return list(found.values())


class UnfinishedError(Exception):
    """A search needs the results of its trials first."""


def make_plan(study: Study, evidence: Evidence) -> Plan:
    """The plan as far as the evidence allows to know it: group by group, part by part, seed by seed."""
    entries: list[Entry] = []
    waiting: list[Entry] = []
    choices: dict[str, dict[str, Choice]] = {}
    for group in study.groups:
        parts: dict[Part, list[Entry]] = {part: [] for part in PARTS}
        for setting in group:
            parts["defaults"] += _defaults(setting)
            trials, chosen = _search(setting, evidence)
            parts["tuning"] += trials
            choices[setting.name] = chosen
            if setting.tune is not None:
                for method in setting.methods:
                    known = method in chosen
                    spec = chosen[method].spec if known else pinned(method)
                    (parts["tuned"] if known else waiting).extend(_tuned(setting, method, spec))
        for part, found in parts.items():
            # Trials method by method: a strength is known when those of its method are done.
            entries += found if part == "tuning" else sorted(found, key=lambda e: e.config.seed)
    return Plan(study, tuple(entries), tuple(waiting), choices)


@cache
def pinned(method: str) -> Spec:
    """The method with its default strength written out: a changed default is another run."""
    spec = parse(method)
    strength = spec.full_strength
    return spec.with_options(**{strength[0]: strength[1]}) if strength else spec


def _defaults(setting: Setting) -> Iterator[Entry]:
    for seed in range(setting.seeds):
        config = setting.config.replace(seed=seed)
        for method in (*setting.methods, *setting.large):
            spec = pinned(method)
            yield Entry(setting, "defaults", setting.called(method), spec.apply(config))
        for control in setting.controls:
            spec = pinned(control.method)
            yield Entry(setting, "defaults", control.name, controlled(control, spec, config))


def controlled(control: Control, spec: Spec, config: Config) -> Config:
    """The config of a control whose method has this strength."""
    changed = config.replace(
        batch=config.batch * control.batch, steps=(config.steps or 1) * control.steps
    )
    return spec.with_options(**control.options).apply(changed)


def _search(setting: Setting, evidence: Evidence) -> tuple[list[Entry], dict[str, Choice]]:
    """The trials that are known, and by method what they led to where all of its own are done."""
    if setting.tune is None:
        return [], {}
    asked: list[Job] = []

    def look(trials: Sequence[Job], title: str) -> list[Result]:
        asked.extend(trials)
        lines = [evidence.lines.get(job.config.identity) for job in trials]
        found = [line.result for line in lines if line is not None]
        if len(found) < len(trials):
            raise UnfinishedError
        return found

    chosen: dict[str, Choice] = {}
    for method in setting.methods:
        with suppress(UnfinishedError):
            spec = pinned(method)
            (chosen[method],) = tune_all([spec], setting.config, setting.tune, look)
    named = [(job.label.rpartition(" seed ")[0], job.config) for job in asked]
    return [Entry(setting, "tuning", name, config) for name, config in named], chosen


def _tuned(setting: Setting, method: str, spec: Spec) -> Iterator[Entry]:
    """The reported runs of a method with this strength, and of the controls that take it."""
    for seed in range(setting.seeds):
        config = setting.config.replace(seed=seed)
        yield Entry(setting, "tuned", setting.called(method), spec.apply(config))
        for control in setting.tuned_controls:
            if control.method == method:
                bare = dataclasses.replace(spec, fields={})
                changed = controlled(control, bare, config.replace(**spec.fields))
                yield Entry(setting, "tuned", control.name, changed)
