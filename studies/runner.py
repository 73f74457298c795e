"""Running a study: every run that has no line yet, part by part, its line written as it ends."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from steppe.lab.engines import Job, Local, run_all
from steppe.lab.errors import LabError, unknown
from steppe.lab.problems import Sources, load_data
from steppe.lab.progress import Listener as Display
from steppe.lab.progress import display
from steppe.lab.results import Result
from steppe.lab.runs import Run
from steppe.lab.specs import parse
from steppe.lab.stopping import ending_after
from studies import minima
from studies.definitions import Study
from studies.evidence import Evidence, Line
from studies.plan import Entry, Part, Plan, make_plan

logger = logging.getLogger("steppe")


@dataclass(frozen=True)
class Limits:
    """A part of a study, which is run now."""

    setting: tuple[str, ...] = ()
    """Only these settings of it, as the list names them."""
    part: tuple[Part, ...] = ()
    """Only these parts of it."""
    method: tuple[str, ...] = ()
    """Only these methods of it, their controls and trials included."""
    seeds: int | None = None
    """Only so many of its seeds."""

    def check(self, study: Study, plan: Plan) -> None:
        """Refuse what the study does not have, which would do nothing."""
        if self.seeds is not None and self.seeds < 1:
            raise LabError(f"seeds must be at least 1, got {self.seeds}.")
        every = (*plan.entries, *plan.waiting)
        known: dict[str, tuple[tuple[str, ...], set[str]]] = {
            "setting": (self.setting, {entry.setting.name for entry in every}),
            "part": (self.part, {entry.part for entry in every}),
            "method": (self.method, {parse(entry.config.method).name for entry in every}),
        }
        for what, (given, valid) in known.items():
            for name in given:
                if name not in valid:
                    raise unknown(f"{what} of {study.name}", name, valid)

    def take(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries within the limits; a limit on seeds leaves the trials alone."""
        return [
            entry
            for entry in entries
            if (not self.setting or entry.setting.name in self.setting)
            and (not self.part or entry.part in self.part)
            and (not self.method or parse(entry.config.method).name in self.method)
            and (self.seeds is None or entry.part == "tuning" or entry.config.seed < self.seeds)
        ]


EVERYTHING = Limits()


def run_study(
    study: Study,
    evidence: Evidence,
    store: Path,
    *,
    jobs: int = 1,
    limits: Limits = EVERYTHING,
    minutes: float | None = None,
    root: str | None = None,
    progress: bool | None = None,
) -> Plan:
    """Do what is missing of a study, `jobs` runs at a time, and give the plan at the end.

    A run's folder in `store` lives until its line is written. Ctrl-C, and the end of `minutes`,
    save the runs under way and raise `Stopped`; after any kill the same call resumes.
    """
    if limits != EVERYTHING:
        unlocked = dataclasses.replace(evidence)  # `evidence` itself is read under its lock
        limits.check(study, make_plan(study, unlocked))
    if minutes is not None and not minutes > 0:
        raise LabError(f"minutes must be above 0, got {minutes:g}.")
    with evidence.writing():
        plan = make_plan(study, evidence)
        todo = [*plan.missing(evidence, limits.take), *limits.take(plan.waiting)]
        for entry in {e.config.data: e for e in todo}.values():  # missing data: now, not in hours
            load_data(entry.config.replace(root=root), Sources())
        weights = {entry.label: entry.seconds for entry in todo}
        with display(progress, weights, study.name) as show, ending_after(minutes):
            while entries := _next(plan.missing(evidence, limits.take)):
                _run(entries, evidence, store, jobs, root, show)
                plan = make_plan(study, evidence)
    return plan


def _next(missing: Sequence[Entry]) -> list[Entry]:
    """The first part of the first group that has something left to do."""
    if not missing:
        return []
    part = missing[0].part
    together = list(itertools.takewhile(lambda entry: entry.part == part, missing))
    logger.info("%s: %d runs", part, len(together))
    return together


def _run(
    entries: Sequence[Entry],
    evidence: Evidence,
    store: Path,
    processes: int,
    root: str | None,
    show: Display,
) -> None:
    by_label = {entry.label: entry for entry in entries}

    def keep(job: Job, result: Result) -> None:
        entry = by_label[job.label]
        assert result.config.identity == entry.run
        assert result.folder is not None  # a study has a store
        message = result.message.partition(" The last good checkpoint")[0]  # names a folder
        kept = dataclasses.replace(result, config=entry.config, message=message)
        evidence.append(Line(entry.label, kept, minima.read(Run(result.folder))))
        shutil.rmtree(result.folder)

    work = [
        Job(entry.label, entry.config.replace(root=root), _measured(entry)) for entry in entries
    ]
    run_all(work, Sources(), store, engine=Local(processes), show=show, keep=keep)


def _measured(entry: Entry) -> Callable[[Result], None] | None:
    """What is measured of the final model."""
    curvature = entry.setting.minima and entry.part != "tuning"
    if not (curvature or entry.robust):
        return None
    return partial(minima.measure, curvature=curvature, robust=entry.robust)
