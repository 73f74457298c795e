"""`steppe analyze`: look at the minima that stored runs have found."""

from __future__ import annotations

import logging
import shlex
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional

import steppe
from steppe.lab.errors import LabError
from steppe.lab.options import Quiet, Words
from steppe.lab.runs import DEFAULT_STORE, Run

logger = logging.getLogger("steppe")

RADII = tuple(float(f"{0.02 * 500 ** (i / 11):.3g}") for i in range(12))
"""From 0.02 to 10, evenly on a logarithmic scale."""


@dataclass(frozen=True)
class Common:
    """Which runs and samples are analysed."""

    samples: int = 1024
    """Number of samples, without augmentation, the same for every run."""
    split: Literal["train", "test"] = "train"
    """Which data."""
    bn: Literal["eval", "batch", "recalibrate"] = "eval"
    """BatchNorm statistics: stored, of each batch, or recomputed wherever the weights are moved."""
    seeds: int = 1
    """Of a comparison: analyse this many runs of each method."""
    again: bool = False
    """Repeat it even if it is stored."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""
    quiet: Quiet = False
    """Print only errors and warnings."""


@dataclass(frozen=True)
class Analysis:
    runs: Annotated[Positional[Words], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Runs: names, folders, patterns with *, or a comparison's FILE.json."""
    common: OmitArgPrefixes[Common] = field(default_factory=Common)

    function: ClassVar[str] = ""
    """Its name in `steppe.analysis`, where it differs."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def options(self) -> dict[str, Any]:
        """The options that are not common to all analyses."""
        every = asdict(self).items()
        return {name: value for name, value in every if name not in ("runs", "common")}

    def arguments(self, run: Run) -> dict[str, Any]:
        """What the function takes beside the problem; by default the options of the command."""
        return self.options()

    @property
    def stem(self) -> str:
        """The name of its file."""
        return self.name

    def request(self) -> dict[str, Any]:
        """All that decides the outcome."""
        common = {name: getattr(self.common, name) for name in ("samples", "split", "bn")}
        return {"analysis": self.name, **self.options(), **common}

    def run(self) -> None:
        """Analyse all runs that do not have this result yet."""
        # Imported here: `--help` must not wait for torch.
        from steppe.report.analyses import described, is_stored, perform, problem_of

        function = getattr(steppe.analysis, self.function or self.name)
        common, request, subjects = self.common, self.request(), self._subjects()
        todo = [r for r in subjects if common.again or not is_stored(r, self.stem, request)]
        if len(todo) < len(subjects):
            logger.info("%d of %d are stored already", len(subjects) - len(todo), len(subjects))
        for number, run in enumerate(todo, 1):
            problem = problem_of(run, common.samples, common.split, common.bn)
            options = {**self.arguments(run), "progress": False if common.quiet else None}
            result = perform(run, self.stem, request, partial(function, problem, **options))
            logger.info("[%d/%d] %s: %s", number, len(todo), run.name, described(result))
        self._say_where(subjects)

    def _say_where(self, subjects: list[Run]) -> None:
        """The numbers and pictures of each run, and how to draw all runs in one figure."""
        from steppe.report.pictures import pictured

        for run in subjects:
            numbers, picture = pictured(run, self.stem)
            also = f", picture: {picture.name}" if picture.exists() else ""
            logger.info("numbers: %s%s", numbers, also)
        if len(subjects) > 1 and self.name != "sharpness":
            store = "" if self.common.store == DEFAULT_STORE else f" --store {self.common.store}"
            logger.info("together: steppe figure %s %s%s", self.name, shlex.join(self.runs), store)

    def _subjects(self) -> list[Run]:
        """The runs named; of a comparison, the first `seeds` of each method."""
        if not self.runs:
            raise LabError(
                f"say which runs: steppe analyze {self.name} RUN; `steppe runs` lists them."
            )
        if self.common.seeds < 1:
            raise LabError(f"seeds must be at least 1, got {self.common.seeds}.")
        from steppe.report.subjects import named_runs

        methods = named_runs(self.runs, self.common.store)
        found = {r.folder: r for _, runs in methods for r in runs[: self.common.seeds]}
        return list(found.values())


@dataclass(frozen=True)
class Landscape(Analysis):
    """Loss and accuracy over a plane along two random filter-normalised directions."""

    n: int = 51
    """Points along each direction; the paper's grid has 50."""
    span: float = 1.0
    """How far to go along each direction."""
    directions: tuple[int, int] = (0, 1)
    """Seeds of the two directions."""

    def arguments(self, run: Run) -> dict[str, Any]:
        return {"n": self.n, "span": self.span, "seeds": self.directions}


@dataclass(frozen=True)
class Spectrum(Analysis):
    """The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature."""

    steps: int = 50
    """Lanczos steps for each probe."""
    probes: int = 2
    """Random starting vectors."""
    seed: int = 0
    """Of the probes."""


@dataclass(frozen=True)
class Radius(Analysis):
    """Expected loss against the radius of random and adversarial perturbations."""

    radii: tuple[float, ...] = RADII
    """Norms of the perturbation."""
    kinds: tuple[Literal["random", "sam", "pgd"], ...] = ("random", "sam", "pgd")
    """Random, one step up the gradient of each batch, several steps."""
    batch: int = 256
    """Samples that give an adversarial direction; decides how far apart the curves lie."""
    directions: int = 16
    """Random directions, each taken both ways."""
    steps: int = 10
    """Steps of ascent of pgd."""
    seed: int = 0
    """Of the random directions."""
    function: ClassVar[str] = "perturbation_curve"


@dataclass(frozen=True)
class Sharpness(Analysis):
    """m-sharpness: how much the loss rises within a radius, at worst or on average."""

    rho: float = 0.05
    """The radius."""
    case: Literal["worst", "average"] = "worst"
    """The largest rise, or the mean one."""
    m: int = 128
    """Samples that share one perturbation."""
    adaptive: bool = False
    """Measure the radius in units of |w| (ASAM)."""
    draws: int = 16
    """Random perturbations of the average case."""
    steps: int = 10
    """Steps of ascent of the worst case."""
    seed: int = 0
    """Of the random perturbations."""

    @property
    def stem(self) -> str:
        return f"sharpness-{self.case}{'-adaptive' if self.adaptive else ''}"


@dataclass(frozen=True)
class Robustness(Analysis):
    """What survives rounding, pruning, weight noise and worse inputs (test data)."""

    common: OmitArgPrefixes[Common] = field(default_factory=lambda: Common(split="test"))
    draws: int = 4
    """Draws of noise, each taken with both signs."""
    recalibration_samples: int = 1024
    """Augmented training samples that BatchNorm statistics are recomputed from after each change; none
    are under --bn batch, which has no stored statistics."""
    include: Literal["matrices", "all"] = "matrices"
    """Change weights of two or more dimensions without embeddings, or every parameter."""
    seed: int = 0
    """Of the noise."""

    def arguments(self, run: Run) -> dict[str, Any]:
        from steppe.lab.problems import load_trained, training_batches

        wanted = self.recalibration_samples if self.common.bn == "eval" else 0
        batches = training_batches(load_trained(run), run.config, wanted)
        return {"recalibrate": batches or None, **self.options()}


@dataclass(frozen=True)
class Ensemble(Analysis):
    """Predictions averaged over weight noise, and the single model's (test data)."""

    common: OmitArgPrefixes[Common] = field(default_factory=lambda: Common(split="test"))
    ratio: float = 0.1
    """Relative displacement of each filter."""
    draws: int = 8
    """Draws that are averaged; as many forwards a prediction."""
    seed: int = 0
    """Of the noise."""

    def arguments(self, run: Run) -> dict[str, Any]:
        return {"ratio": self.ratio, "samples": self.draws, "seed": self.seed}


@dataclass(frozen=True)
class Analyze:
    """Measure landscape, spectrum, radius, sharpness, robustness or an ensemble of finished runs.

    Example: steppe analyze landscape digits-arwp-seed0; steppe analyze spectrum FILE.json
    """

    what: OmitSubcommandPrefixes[
        OmitArgPrefixes[Landscape | Spectrum | Radius | Sharpness | Robustness | Ensemble]
    ]

    def run(self) -> None:
        self.what.run()
