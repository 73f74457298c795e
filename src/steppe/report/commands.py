"""`steppe report` and `steppe figure`: the page, and static figures of stored runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro
from tyro.conf import Positional

from steppe.lab.errors import LabError
from steppe.lab.options import Maybe, Quiet, Words
from steppe.lab.runs import DEFAULT_STORE

logger = logging.getLogger("steppe")

Kind = Literal["landscape", "spectrum", "radius", "robustness", "ensemble"]
"""The analyses that one figure shows of several runs."""


@dataclass(frozen=True)
class Report:
    """Write one HTML page about a comparison or some runs, with their stored analyses.

    The page needs no network and no other file. Example: steppe report noisy.json -o report.html
    """

    runs: Annotated[Positional[Words], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """A comparison (FILE.json of compare --out), or runs: names, folders, patterns with *."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """The file to write."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""
    quiet: Quiet = False
    """Print only errors and warnings."""

    def run(self) -> None:
        from steppe.report.gathered import Gathered
        from steppe.report.page import absent, write_page
        from steppe.report.subjects import find_comparison

        if self.out.suffix not in (".html", ".htm"):
            raise LabError(f"--out {self.out}: the name must end in .html.")
        gathered = Gathered(find_comparison(self.runs, self.store), self.runs, self.store)
        for part in absent(gathered):
            logger.info("no %s yet; to add it: %s", part.title.lower(), part.command)
        written = write_page(gathered, self.out)
        logger.info("report: %s (open it in a browser)", written.resolve())


@dataclass(frozen=True)
class Figures:
    """Draw a figure from stored runs, as PNG and SVG.

    Of any runs: landscape, spectrum, radius, robustness, ensemble (`steppe analyze` measures them). Of
    the paper: 1 radius, 2 convergence, 3 trade-off, 4 sensitivity, 5 landscapes and spectra, theory. If
    something is missing, the error names the command that makes it.
    Example: steppe figure landscape mine.json; steppe figure 2 --recipe digits
    """

    figure: Annotated[
        Positional[Literal[Kind, "1", "2", "3", "4", "5", "theory"]],
        tyro.conf.arg(metavar=f"{{{','.join(get_args(Kind))},1-5,theory}}"),
    ]
    """Which figure."""
    runs: Annotated[Positional[Words], tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Runs to draw: names, patterns with *, FILE.json of compare or sweep. Figures 1 to 5 also go by recipe."""
    recipe: Maybe[str] = None
    """Figures 1 to 5: draw runs of this recipe. Not given: the paper's."""
    methods: Annotated[Words, tyro.conf.arg(metavar="METHOD [METHOD ...]")] = ()
    """Figures 1 to 5: methods of the recipe. Not given: the paper's."""
    out: Annotated[Maybe[Path], tyro.conf.arg(aliases=["-o"])] = None
    """Where to write, without a suffix. Not given: figure-NAME."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""
    quiet: Quiet = False
    """Print only errors and warnings."""

    def run(self) -> None:
        from steppe.report.canvas import save_figure
        from steppe.report.paper import PaperFigure
        from steppe.report.pictures import analysis_figure
        from steppe.report.subjects import named_runs

        try:
            if self.figure in get_args(Kind):
                if self.recipe is not None or self.methods:
                    raise LabError(
                        f"--recipe and --methods belong to figures 1 to 5: name the runs, "
                        f"steppe figure {self.figure} RUN."
                    )
                if not self.runs:
                    raise LabError(
                        f"say which runs: steppe figure {self.figure} RUN; `steppe runs` lists them."
                    )
                runs = named_runs(self.runs, self.store)
                drawn = {"": analysis_figure(self.figure, runs, self.store)}
            else:
                paper = PaperFigure(self.figure, self.runs, self.recipe, self.methods, self.store)
                drawn = paper.draw()
        except ImportError as error:
            raise LabError(str(error)) from None
        stem = self.out or Path(f"figure-{self.figure}")
        for part, figure in drawn.items():
            target = stem.with_name(f"{stem.stem}{part and f'-{part}'}")
            for file in save_figure(figure, target):
                logger.info("written to %s", file)
