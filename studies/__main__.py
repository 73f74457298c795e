"""`python -m studies`: list the studies, train what is missing of one, or write the pages."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from steppe.lab.engines import Stopped
from steppe.lab.errors import LabError
from steppe.lab.progress import duration
from steppe.lab.runs import DEFAULT_STORE
from steppe.lab.tables import Table
from studies.definitions import STUDIES, study
from studies.evidence import DEFAULT_EVIDENCE, Evidence
from studies.plan import PARTS, Plan, make_plan
from studies.runner import Limits, run_study

logger = logging.getLogger("steppe")


@dataclass(frozen=True)
class Command:
    """List the studies, or train what is missing of one: each run becomes a line of evidence.

    Stop it at any moment: the same command resumes. Example: python -m studies digits --jobs 2
    """

    name: Annotated[Positional[str | None], tyro.conf.arg(metavar="STUDY")] = None
    """A study (or finetune, which has its own runs); none: list them all, with what is done and missing."""
    jobs: int = 0
    """Runs side by side, one thread each; 0: as many as there are cores."""
    limits: OmitArgPrefixes[Limits] = field(default_factory=Limits)
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
    archive: str | None = None
    """Train nothing: move lines that no study uses any more to evidence/archive/NAME."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """No progress."""

    def run(self) -> None:
        if self.page or self.archive is not None:
            if self.name is not None:
                raise LabError("--page and --archive are about all studies: leave the name away.")
            if not self.evidence.is_dir():
                raise LabError(f"there is no folder {self.evidence} of lines of evidence.")
            if self.archive is not None:
                self._archive(self.archive)
            if self.page:
                from studies.page import write_page

                files = write_page(self.evidence, self.docs)
                logger.info("written to %s, with %d more files", files[0], len(files) - 1)
            return
        if self.jobs < 0:
            raise LabError(f"jobs must be at least 0, got {self.jobs}.")
        processes = self.jobs or os.cpu_count() or 1
        if self.name == "finetune":
            from studies.finetune import run_finetune

            root = Path(self.root or ".")
            words = run_finetune(self.evidence, root, self.minutes, self.limits.seeds, processes)
            sys.stdout.write(f"{words}\n")
            return
        if self.name is None:
            plans = [make_plan(s, Evidence(self.evidence, s.name)) for s in STUDIES.values()]
        else:
            plans = [self._train(self.name, processes)]
        sys.stdout.write(listing(plans, self.evidence, processes) + "\n")

    def _train(self, name: str, processes: int) -> Plan:
        chosen = study(name)
        return run_study(
            chosen,
            Evidence(self.evidence, chosen.name),
            self.store,
            jobs=processes,
            limits=self.limits,
            minutes=self.minutes,
            root=self.root,
            progress=False if self.quiet else None,
        )

    def _archive(self, name: str) -> None:
        for each in STUDIES.values():
            evidence = Evidence(self.evidence, each.name)
            runs = {entry.run for entry in make_plan(each, evidence).entries}
            if moved := evidence.archive(name, runs):
                logger.info("%s: %d lines moved to archive/%s", each.name, moved, name)


def listing(plans: Iterable[Plan], folder: Path, processes: int) -> str:
    """What is done and missing of each part, and how long the rest will take."""
    rows = []
    for plan in plans:
        evidence = Evidence(folder, plan.study.name)
        missing = plan.missing(evidence)
        for setting in plan.study.settings:
            for part in PARTS:
                runs = {entry.run for entry in plan.of(setting, part)}
                later = [e for e in plan.waiting if e.setting is setting and part == e.part]
                if not runs and not later:
                    continue
                open_ones = [e for e in missing if e.setting is setting and e.part == part]
                left = sum(entry.seconds for entry in [*open_ones, *later]) / processes
                done = len(runs - {entry.run for entry in missing})
                total = len(runs) + len(later)
                time = duration(left) if left else "–"
                rows.append((plan.study.name, setting.name, part, f"{done} of {total}", time))
    note = (
        f"Time left on {processes} cores, roughly. Trials beyond a grid's edge come on top. "
        "Resume with: python -m studies NAME",
    )
    header = ("study", "setting", "part", "runs", "time left")
    return Table(header, tuple(rows), "", note).render("text")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code: 0, 2 for a mistake, 130 for Ctrl-C."""
    style = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
    command = tyro.cli(Command, prog="python -m studies", args=arguments, config=style)
    logger.setLevel(logging.WARNING if command.quiet else logging.INFO)
    if logging.lastResort is not None:  # writes to what sys.stderr is then: a progress bar's own
        logging.lastResort.setLevel(logging.INFO)
    try:
        command.run()
    except (LabError, ImportError) as error:
        sys.stderr.write(f"studies: {error}\n")
        return 2
    except KeyboardInterrupt as stop:
        how = f"{stop}, the others are saved" if isinstance(stop, Stopped) else "runs are saved"
        sys.stderr.write(f"Stopped: {how}. The same command resumes.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
