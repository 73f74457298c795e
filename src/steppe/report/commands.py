"""`steppe report`: the page."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from steppe.lab.errors import LabError
from steppe.lab.runs import DEFAULT_STORE
from steppe.report.gathered import Gathered
from steppe.report.page import absent, write_page
from steppe.report.subjects import find_comparison

logger = logging.getLogger("steppe")


@dataclass(frozen=True)
class Report:
    """Write one HTML page about a comparison or some runs, with their stored analyses.

    The page needs no network and no other file. Example: steppe report noisy.json -o report.html
    """

    runs: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """A comparison (FILE.json of compare --out), or runs: names, folders, patterns with *."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The file to write."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """Only mistakes and warnings."""

    def run(self) -> None:
        if self.out.suffix not in (".html", ".htm"):
            raise LabError(f"--out {self.out}: the name must end in .html.")
        gathered = Gathered(find_comparison(self.runs, self.store), self.runs, self.store)
        for part in absent(gathered):
            logger.info("left out, %s: %s makes it", part.title.lower(), part.command)
        written = write_page(gathered, self.out)
        logger.info("the report is in %s (open it in a browser)", written.resolve())
