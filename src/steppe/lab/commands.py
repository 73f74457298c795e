"""The commands that train: each a dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import tyro
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction

from steppe.lab.comparison import Comparison, compare
from steppe.lab.config import Config, read_config, settings
from steppe.lab.engines import Engine, Local
from steppe.lab.errors import LabError, unknown
from steppe.lab.jobs import Stopped
from steppe.lab.listings import DataSets, PaperTable, Recipes, Runs
from steppe.lab.ranks import world
from steppe.lab.ray_engine import Ray
from steppe.lab.recipes import recipe
from steppe.lab.runs import DEFAULT_STORE, Store
from steppe.lab.specs import PAPER
from steppe.lab.specs import parse as parse_spec
from steppe.lab.sweeps import SEARCHES, Sweep, parse_grid, search, sweep
from steppe.lab.tables import wrapped
from steppe.lab.training import train
from steppe.lab.tuning import Tune
from steppe.report.analyze import Analyze
from steppe.report.commands import Report
from steppe.report.paper import Figures
from steppe.study.command import Studies

__all__ = ["COMMANDS", "Stopped", "parse"]
logger = logging.getLogger("steppe")

Shape = Literal["text", "markdown", "csv", "json"]
Quiet = Annotated[bool, tyro.conf.arg(aliases=["-q"])]
SUFFIXES: dict[str, Shape] = {".md": "markdown", ".csv": "csv", ".json": "json", ".txt": "text"}
Several = UseAppendAction[tuple[str, ...]]


class Command(Protocol):
    """Parsed options that can be run."""

    def run(self) -> None: ...


@dataclass(frozen=True)
class Train:
    """Train one run, from a recipe, a config file or options; go on with a stopped one.

    A finished run is not trained again. Example: steppe train digits --method arwp --seed 1
    """

    recipe: Annotated[Positional[str | None], tyro.conf.arg(metavar="RECIPE")] = None
    """A recipe of `steppe recipes`; the options below change it."""
    config: Path | None = None
    """A TOML or JSON file of settings; a run's own config.json repeats it."""
    set: Several = ()
    """NAME=VALUE: any setting, also data_options.NAME and model_options.NAME. May be repeated."""
    resume: str | None = None
    """Go on with this run (its folder or its name)."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""
    quiet: Quiet = False
    """Only the result."""
    settings: OmitArgPrefixes[Config] = field(default_factory=Config)

    def run(self) -> None:
        config, store = self.settings, self.store
        if self.resume is not None:
            config, store = world().from_first(self._stopped_run)
        result = train(config, store=store, progress=False if self.quiet else None)
        if result.reused:
            logger.info("this run was finished before; nothing was trained")
        _write(result.table())
        if result.folder is not None and not self.quiet:
            logger.info("kept in %s", result.folder)

    def _stopped_run(self) -> tuple[Config, Path]:
        run = Store(self.store).get(self.resume or "")
        if run.status == "unfinished":
            logger.info("going on with %s from step %d", run.name, run.progress())
        return run.config, run.folder.parent


@dataclass(frozen=True)
class Running:
    """How many runs are trained and shown."""

    jobs: int = 0
    """Runs side by side, sharing the threads; 0: as many as there are cores for, of one thread."""
    engine: Literal["local", "ray"] = "local"
    """Where runs are trained: processes of this machine, or tasks of a Ray cluster."""
    address: str | None = None
    """The Ray cluster, HOST:PORT, or auto for the one running here; none: start one here."""
    cpus_per_trial: float | None = None
    """CPUs that a run asks Ray for; none: as many as it has threads."""
    gpus_per_trial: float | None = None
    """GPUs that a run asks Ray for, 0.5 for two runs on one; none: 1 where the device is cuda."""
    format: Shape = "text"
    """How the table is written."""
    out: UseAppendAction[tuple[Path, ...]] = ()
    """Also write the table to this file: .md, .csv, .json or .txt. May be repeated."""
    store: Path = DEFAULT_STORE
    """The folder of runs."""
    quiet: Quiet = False
    """Only the table."""

    def arguments(self, config: Config) -> dict[str, Any]:
        """What `compare` and `sweep` want to know of this."""
        return {
            "store": self.store,
            "jobs": self.jobs or None,
            "engine": self._engine(config),
            "progress": False if self.quiet else None,
        }

    def _engine(self, config: Config) -> Engine | Literal["local", "ray"]:
        if self.engine == "ray":
            return Ray(self.address, self.cpus_per_trial, self.gpus_per_trial)
        for name in ("address", "cpus_per_trial", "gpus_per_trial"):
            if getattr(self, name) is not None:
                option = name.replace("_", "-")
                raise LabError(f"--{option} is for Ray: add --engine ray, or leave it away.")
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
        if not world().leads:
            return
        _write(_rendered(result, self.format, to_terminal=True))
        for file in self.out:
            file.parent.mkdir(parents=True, exist_ok=True)
            text = _rendered(result, SUFFIXES[file.suffix])
            file.write_text(text + "\n", encoding="utf-8")
            logger.info("written to %s", file)


@dataclass(frozen=True)
class Compare:
    """Train several methods on several seeds and say which differ.

    Without options: the paper's six methods on scikit-learn's digits. Each seed gives all methods
    the same initial weights and data order. Finished runs are reused.
    Example: steppe compare sgd sam:rho=.1 arwp:ratio=.6,eta=1 --recipe cifar10-small --seeds 5
    """

    methods: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="[METHOD ...]")] = ()
    """Methods with their options, sam:rho=.1; any setting can be changed for one: sgd:batch=256."""
    recipe: str | None = None
    """Start from this recipe (default: digits, unless --data says otherwise)."""
    config: Path | None = None
    """Start from a TOML or JSON file of settings."""
    set: Several = ()
    """NAME=VALUE: any setting, also data_options.NAME and model_options.NAME. May be repeated."""
    seeds: int = 3
    """How many seeds; 5 or more for a verdict."""
    tune: bool = False
    """First choose each method's strength on a validation split of the training data."""
    tuning: Tune = field(default_factory=Tune)
    like: Path | None = None
    """Take the methods and their strengths from an earlier comparison (its --out FILE.json)."""
    robustness: bool = True
    """Also measure the models after rounding to 4 and 3 bits and pruning of 50 and 80 %."""
    running: OmitArgPrefixes[Running] = field(default_factory=Running)
    settings: OmitArgPrefixes[Config] = field(default_factory=Config)

    def run(self) -> None:
        self.running.check()
        methods = [self._spec(text) for text in self.methods or PAPER]
        if self.like is not None:
            methods = [*methods_of(self.like), *map(self._spec, self.methods)]
        result = compare(
            methods=methods,
            seeds=self.seeds,
            config=self.settings,
            tune=self.tuning if self.tune else False,
            robustness=self.robustness,
            **self.running.arguments(self.settings),
        )
        self.running.deliver(result)

    def _spec(self, text: str) -> str:
        """The method with the recipe's options for it; options of its own go first."""
        spec = parse_spec(text)
        if not self.settings.recipe:
            return text
        own = parse_spec(recipe(self.settings.recipe, text).method)
        return str(dataclasses.replace(own, fields=spec.fields))


def methods_of(file: Path) -> list[str]:
    """The methods of a comparison that was written as JSON, with the strengths it used."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        return [row["spec"] for row in rows]
    except OSError as error:
        raise LabError(f"cannot read {file}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise LabError(f"{file} is not a comparison: write one with --out FILE.json.") from None


@dataclass(frozen=True)
class SweepGrid:
    """Train a grid over any settings and method options.

    The paper's searches by name, or a grid of your own. With --validation 0.2 the best point is
    named; without it the test metric is shown and chooses nothing.
    Example: steppe sweep digits --method arwp --over eta=.01,.1,1 --over ratio=.3,.6
    """

    recipe: Annotated[Positional[str | None], tyro.conf.arg(metavar="RECIPE")] = None
    """A recipe of `steppe recipes`; the options below change it."""
    over: Several = ()
    """NAME=VALUE,VALUE,…: a setting or an option of the method. May be repeated."""
    search: str | None = None
    """A search of the paper's: rho, rho-vit, sigma, eta-beta, sigma-lam."""
    config: Path | None = None
    """Start from a TOML or JSON file of settings."""
    set: Several = ()
    """NAME=VALUE: any setting. May be repeated."""
    seeds: int = 1
    """How many seeds."""
    running: OmitArgPrefixes[Running] = field(default_factory=Running)
    settings: OmitArgPrefixes[Config] = field(default_factory=Config)

    def run(self) -> None:
        self.running.check()
        if not self.over and self.search is None:
            names = ", ".join(SEARCHES)
            raise LabError(f"say what to vary: --over lr=.01,.1 or --search one of {names}.")
        named = search(self.search) if self.search else {}
        result = sweep(
            self.settings,
            {**named, **parse_grid(self.over)},
            self.seeds,
            **self.running.arguments(self.settings),
        )
        self.running.deliver(result)


COMMANDS: dict[str, type[Command]] = {
    "compare": Compare,
    "train": Train,
    "sweep": SweepGrid,
    "recipes": Recipes,
    "runs": Runs,
    "table": PaperTable,
    "data": DataSets,
    "analyze": Analyze,
    "figure": Figures,
    "report": Report,
    "study": Studies,
}


TRAINING = ("compare", "train", "sweep")
"""Those in which every rank takes part under torchrun; the others are rank 0's."""


def parse(name: str, arguments: list[str]) -> Command:
    """The command with its options; a recipe or config file gives the options' defaults."""
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    kind: Any = COMMANDS[name]
    prog = f"steppe {name}"
    wanted = [word for word in arguments if word not in ("-h", "--help")]
    if not any(f.name == "settings" for f in dataclasses.fields(kind)):
        return _read(kind, prog, arguments)  # type: ignore[no-any-return]
    help_only = len(wanted) < len(arguments)
    first = _read(kind, prog, arguments if help_only and not wanted else wanted)
    if getattr(first, "resume", None) is not None and not help_only:
        return first  # type: ignore[no-any-return]
    base = starting_point(first, method_given=any(w.startswith("--method") for w in arguments))
    command = _read(kind, prog, arguments, dataclasses.replace(kind(), settings=base))
    changed = command.settings.replace(method=base.method).override(settings(command.set))
    return dataclasses.replace(command, settings=changed)  # type: ignore[no-any-return]


def _read(kind: Any, prog: str, arguments: list[str], default: Any = None) -> Any:
    chosen = {} if default is None else {"default": default}
    return tyro.cli(kind, prog=prog, args=arguments, config=(tyro.conf.DisallowNone,), **chosen)


def starting_point(command: Any, *, method_given: bool) -> Config:
    """The config that a command's options change: of its recipe, its file, or the defaults."""
    method = command.settings.method
    if command.config is not None:
        if command.recipe is not None:
            raise LabError("give a recipe or --config FILE, not both.")
        stored = read_config(command.config)
        return stored.replace(method=method) if method_given else stored
    name = command.recipe
    if name is None and isinstance(command, Compare):
        fresh = (command.settings.data, command.settings.model) == (Config().data, Config().model)
        name = "digits" if fresh else None
    return Config(method=method) if name is None else recipe(name, method)


def _rendered(result: Comparison | Sweep, shape: Shape, *, to_terminal: bool = False) -> str:
    if shape == "json":
        return json.dumps(result.to_dict(), indent=2)
    return wrapped(result.table(shape)) if to_terminal and shape == "text" else result.table(shape)


def _write(text: str) -> None:
    if not world().leads:
        return
    sys.stdout.write(text + "\n")
