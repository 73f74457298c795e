"""`steppe study`: list the studies, or go on with one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from steppe.lab.errors import LabError, unknown
from steppe.lab.progress import duration
from steppe.lab.runs import DEFAULT_STORE
from steppe.lab.tables import Table
from steppe.study.definitions import STUDIES, Study, study
from steppe.study.evidence import DEFAULT_EVIDENCE, Evidence
from steppe.study.plan import PARTS, Part, Plan, make_plan
from steppe.study.runner import Limits, run_study

logger = logging.getLogger("steppe")


@dataclass(frozen=True)
class Studies:
    """List the studies, or train what is missing of one and keep each run as a line of evidence.

    Stop it whenever you like: the same command goes on. steppe study --page writes what the lines say.
    Example: steppe study digits --jobs 2
    """

    name: Annotated[Positional[str | None], tyro.conf.arg(metavar="STUDY")] = None
    """A study; none: list them all, with what is done and missing."""
    jobs: int = 0
    """Runs side by side, one thread each; 0: as many as there are cores."""
    setting: tuple[str, ...] = ()
    """Only these settings of it, as the list names them."""
    part: tuple[Part, ...] = ()
    """Only these parts of it."""
    method: tuple[str, ...] = ()
    """Only these methods of it, their controls and trials included."""
    seeds: int | None = None
    """Only so many of its seeds."""
    minutes: float | None = None
    """Stop after so many minutes."""
    evidence: Path = DEFAULT_EVIDENCE
    """The folder of evidence: a file for each study, a line for each run."""
    store: Path = DEFAULT_STORE / "studies"
    """Where runs live until their line is written."""
    root: str | None = None
    """The folder where data sets are."""
    page: bool = False
    """Train nothing: write docs/evidence.md and its figures from the lines that exist."""
    docs: Path = Path("docs")
    """The folder of that page."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """No progress."""

    def run(self) -> None:
        if self.page:
            self._write_page()
            return
        if self.jobs < 0:
            raise LabError(f"jobs must be at least 0, got {self.jobs}.")
        processes = self.jobs or os.cpu_count() or 1
        if self.name is None:
            _write(listing([self._state(each) for each in STUDIES.values()], processes))
            return
        chosen = study(self.name)
        _check("setting", self.setting, {each.name for each in chosen.settings})
        _check("method", self.method, {m for each in chosen.settings for m in each.methods})
        plan = run_study(
            chosen,
            Evidence(self.evidence, chosen.name),
            self.store,
            jobs=processes,
            limits=Limits(self.setting, self.part, self.method, self.seeds),
            minutes=self.minutes,
            root=self.root,
            progress=False if self.quiet else None,
        )
        _write(listing([(plan, Evidence(self.evidence, chosen.name))], processes))

    def _write_page(self) -> None:
        if self.name is not None:
            raise LabError("the page shows all studies: steppe study --page, without a name.")
        if not self.evidence.is_dir():
            raise LabError(f"there is no folder {self.evidence} to read lines of evidence from.")
        try:
            from steppe.study.page import write_page

            files = write_page(self.evidence, self.docs)
        except ImportError as error:
            raise LabError(str(error)) from None
        logger.info("written to %s, with %d figures", files[0], len(files) - 1)

    def _state(self, each: Study) -> tuple[Plan, Evidence]:
        evidence = Evidence(self.evidence, each.name)
        return make_plan(each, evidence), evidence


def listing(states: list[tuple[Plan, Evidence]], processes: int) -> str:
    """What is done and missing of each part, and how long the rest will take."""
    rows = []
    for plan, evidence in states:
        missing = plan.missing(evidence)
        for setting in plan.study.settings:
            for part in PARTS:
                runs = {entry.run for entry in plan.of(setting, part)}
                later = [e for e in plan.waiting if e.setting is setting and part == e.part]
                if not runs and not later:
                    continue
                open_ones = [e for e in missing if e.setting is setting and e.part == part]
                left = sum(entry.seconds for entry in [*open_ones, *later]) / processes
                done = sum(evidence.find(run) is not None for run in runs)
                total = len(runs) + len(later)
                time = duration(left) if left else "–"
                rows.append((plan.study.name, setting.name, part, f"{done} of {total}", time))
    note = (
        f"Time left on {processes} cores, roughly. Trials beyond a grid's edge come on top. "
        "Go on with: steppe study NAME",
    )
    header = ("study", "setting", "part", "runs", "time left")
    return Table(header, tuple(rows), "", note).render("text")


def _check(what: str, given: Iterable[str], known: set[str]) -> None:
    for name in given:
        if name not in known:
            raise unknown(what, name, known)


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
