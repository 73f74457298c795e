"""The commands that train: each a dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional, Suppress, UseAppendAction

from steppe.lab.config import Config
from steppe.lab.errors import LabError
from steppe.lab.options import Maybe, Quiet, Repeated, Words
from steppe.lab.recipes import recipe
from steppe.lab.runs import DEFAULT_STORE, Store
from steppe.lab.specs import parse as parse_spec
from steppe.lab.specs import usual_methods
from steppe.lab.tables import terminal_width
from steppe.lab.tuning import Tune

# What trains is imported where it is used: `--help` must not wait for torch.
if TYPE_CHECKING:
    from steppe.lab.comparison import Comparison
    from steppe.lab.engines import Engine
    from steppe.lab.sweeps import Sweep

logger = logging.getLogger("steppe")

Shape = Literal["text", "markdown", "csv", "json"]
SUFFIXES: dict[str, Shape] = {".md": "markdown", ".csv": "csv", ".json": "json", ".txt": "text"}


@dataclass(frozen=True)
class Started:
    """What a config starts from, and what is set in it by name."""

    config: Maybe[Path] = None
    """Start from a TOML or JSON file of settings; a run's own config.json repeats it."""
    set: Repeated = ()
    """NAME=VALUE: any setting, also data_options.NAME and model_options.NAME. Repeatable."""
    target: Maybe[str] = None
    """With --data FILE.csv: the column to predict."""


@dataclass(frozen=True)
class Train(Started):
    """Train one run from a recipe, a config file or options, or resume a stopped one.

    A finished run is not trained again. Example: steppe train digits --method arwp --seed 1
    """

    recipe: Annotated[Positional[Maybe[str]], tyro.conf.arg(metavar="RECIPE")] = None
    """A recipe of `steppe recipes`; the options below change it."""
    resume: Maybe[str] = None
    """Resume this run (its folder or its name)."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""
    quiet: Quiet = False
    """Print only the result."""
    settings: OmitArgPrefixes[Config] = field(default_factory=Config)

    def run(self) -> None:
        from steppe.lab.ranks import world
        from steppe.lab.training import train

        config, store = self.settings, self.store
        if self.resume is not None:
            config, store = world().from_first(self._stopped_run)
        result = train(config, store=store, progress=False if self.quiet else None)
        if result.reused:
            logger.info("this run was finished before; nothing was trained")
        _write(result.table())
        if result.folder is not None and not self.quiet:
            logger.info("run folder: %s", result.folder)

    def _stopped_run(self) -> tuple[Config, Path]:
        run = Store(self.store).get(self.resume or "")
        if run.status == "unfinished":
            logger.info("resuming %s at step %d", run.name, run.progress())
        return run.config, run.folder.parent


@dataclass(frozen=True)
class Running:
    """How runs are trained, and what is written."""

    jobs: int = 0
    """Runs in parallel, sharing the threads; 0: one per core, one thread each."""
    engine: Literal["local", "ray"] = "local"
    """Where runs are trained: processes on this machine, or tasks of a Ray cluster."""
    address: Maybe[str] = None
    """The Ray cluster, HOST:PORT, or auto for the one running here. Not given: start one here."""
    cpus_per_trial: Maybe[float] = None
    """CPUs that a run asks Ray for. Not given: as many as it has threads."""
    gpus_per_trial: Maybe[float] = None
    """GPUs that a run asks Ray for, 0.5 for two runs on one. Not given: 1 on cuda devices."""
    format: Shape = "text"
    """Format of the printed table."""
    out: UseAppendAction[
        Annotated[tuple[Path, ...], tyro.conf.arg(help_behavior_hint="", metavar="FILE")]
    ] = ()
    """Also write the table to this file: .md, .csv, .json or .txt. Repeatable."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""
    quiet: Quiet = False
    """Print only the table."""

    def arguments(self, config: Config) -> dict[str, Any]:
        """What `compare` and `sweep` want to know of this."""
        return {
            "store": self.store,
            "jobs": self.jobs or None,
            "engine": self._engine(config),
            "progress": False if self.quiet else None,
        }

    def _engine(self, config: Config) -> Engine | Literal["local", "ray"]:
        from steppe.lab.engines import Local
        from steppe.lab.ranks import world

        if self.engine == "ray":
            from steppe.lab.ray_engine import Ray

            return Ray(self.address, self.cpus_per_trial, self.gpus_per_trial)
        for name in ("address", "cpus_per_trial", "gpus_per_trial"):
            if getattr(self, name) is not None:
                option = name.replace("_", "-")
                raise LabError(f"--{option} is for Ray: add --engine ray, or leave it out.")
        if self.jobs:
            return "local"
        alone = config.device.startswith("cuda") or world().several
        cores = 1 if alone else os.cpu_count() or 1
        return Local(max(1, cores // (config.threads or 1)))

    def check(self) -> None:
        """Before hours of training, not after them."""
        for file in self.out:
            if file.suffix not in SUFFIXES:
                raise LabError(f"--out {file}: the name must end in {', '.join(SUFFIXES)}.")

    def deliver(self, result: Comparison | Sweep) -> None:
        """The table to standard output, and to files in the form that their names say."""
        from steppe.lab.ranks import world

        if not world().leads:
            return

        def rendered(shape: Shape, width: int | None = None) -> str:
            if shape == "json":
                return json.dumps(result.to_dict(), indent=2)
            return result.table(shape, width)

        _write(rendered(self.format, terminal_width()))
        for file in self.out:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(rendered(SUFFIXES[file.suffix]) + "\n", encoding="utf-8")
            logger.info("written to %s", file)

    def next_steps(self, runs: int) -> None:
        """Where the runs are, and what can be done with them."""
        number = f"{runs} run{'s' * (runs != 1)}"
        logger.info("\n%s in %s (`steppe runs` lists them)", number, self.store)
        store = "" if self.store == DEFAULT_STORE else f" --store {shlex.quote(str(self.store))}"
        file = next((str(file) for file in self.out if file.suffix == ".json"), None)
        if file is None:
            logger.info("next: add --out mine.json (finished runs are reused), then")
        command = f"steppe report {shlex.quote(file or 'mine.json')}{store} -o report.html"
        logger.info("%s%s", "next: " if file else "      ", command)


@dataclass(frozen=True)
class Shared(Config):
    """What all runs share: data, model and training."""

    method: Annotated[str, Suppress] = "sgd"
    seed: Annotated[int, Suppress] = 0


@dataclass(frozen=True)
class Compare(Started):
    """Train several methods on several seeds and report which differ.

    Without options: the paper's six methods at default strengths (for safety) and rwp:rise=0.2 (for
    compression) on the recipe `digits`. Each seed gives all methods the same initial weights and data
    order. Finished runs are reused.
    Example: steppe compare sgd sam:rho=.1 rwp:rise=.2 --data wine --seeds 5
    """

    methods: Annotated[Positional[Words], tyro.conf.arg(metavar="[METHOD ...]")] = ()
    """Methods with options or settings of their own: sam:rho=.1, sgd:batch=256. Not given: sgd sam rwp arwp m-rwp m-arwp rwp:rise=0.2 (never tuned; not with --no-robustness)."""
    recipe: Maybe[str] = None
    """Start from this recipe. Not given: digits; none where --data, --model or --config is given."""
    seeds: int = 3
    """Number of seeds; at least 5 for a verdict."""
    tune: bool = False
    """First choose each method's strength on a validation split of the training data."""
    tuning: Tune = field(default_factory=Tune)
    robustness: bool = True
    """Also measure the models after rounding to 4 and 3 bits and pruning of 50 and 80 %."""
    running: OmitArgPrefixes[Running] = field(default_factory=Running)
    settings: OmitArgPrefixes[Shared] = field(default_factory=Shared)

    def run(self) -> None:
        from steppe.lab.comparison import compare

        self.running.check()
        usual = usual_methods(robustness=self.robustness)
        result = compare(
            methods=[self._spec(text) for text in self.methods or usual],
            seeds=self.seeds,
            config=self.settings,
            tune=self.tuning if self.tune else False,
            robustness=self.robustness,
            **self.running.arguments(self.settings),
        )
        self.running.deliver(result)
        self.running.next_steps(sum(len(row.results) for row in result.rows))

    def _spec(self, text: str) -> str:
        """The method with the recipe's options for it; options of its own go first."""
        spec = parse_spec(text)
        if not self.settings.recipe:
            return text
        own = parse_spec(recipe(self.settings.recipe, text).method)
        return str(dataclasses.replace(own, fields=spec.fields))


@dataclass(frozen=True)
class Swept(Config):
    """What all runs share: data, model, method and training."""

    seed: Annotated[int, Suppress] = 0


@dataclass(frozen=True)
class SweepGrid(Started):
    """Train a grid over any settings and method options.

    A search by name, or a grid of your own. With --validation 0.2 the best point is
    named; without it the test metric is shown and no point is chosen.
    Example: steppe sweep digits --method arwp --over eta=.01,.1,1 --over ratio=.3,.6
    """

    recipe: Annotated[Positional[Maybe[str]], tyro.conf.arg(metavar="RECIPE")] = None
    """A recipe of `steppe recipes`; the options below change it."""
    over: Repeated = ()
    """NAME=VALUE,VALUE,…: a setting or an option of the method. Repeatable."""
    search: Maybe[str] = None
    """rise, or one of the paper's searches: rho, rho-vit, sigma, eta-beta, sigma-lam."""
    seeds: int = 1
    """Number of seeds."""
    running: OmitArgPrefixes[Running] = field(default_factory=Running)
    settings: OmitArgPrefixes[Swept] = field(default_factory=Swept)

    def run(self) -> None:
        from steppe.lab.sweeps import parse_grid, search, sweep

        self.running.check()
        named = search(self.search) if self.search else {}
        result = sweep(
            self.settings,
            {**named, **parse_grid(self.over)},
            self.seeds,
            **self.running.arguments(self.settings),
        )
        self.running.deliver(result)


def _write(text: str) -> None:
    from steppe.lab.ranks import world

    if world().leads:
        sys.stdout.write(text + "\n")
