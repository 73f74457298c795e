"""From words on the command line to a command with its options."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import textwrap
from typing import Any

import tyro

from steppe.lab.config import Config, read_config, settings
from steppe.lab.errors import LabError, looked_up
from steppe.lab.recipes import recipe

COMMANDS = {
    "compare": "lab.commands:Compare",
    "train": "lab.commands:Train",
    "sweep": "lab.commands:SweepGrid",
    "recipes": "lab.listings:Recipes",
    "runs": "lab.listings:Runs",
    "table": "lab.listings:PaperTable",
    "data": "lab.listings:DataSets",
    "analyze": "report.analyze:Analyze",
    "figure": "report.commands:Figures",
    "report": "report.commands:Report",
}
"""Where the commands' classes are; none of these modules imports torch, so that help is quick."""
TRAINING = ("compare", "train", "sweep")
"""Those in which every rank takes part under torchrun; the others are rank 0's."""

SEEDS = "it trains seeds 0 to N-1, and --seeds N says how many"
GIVEN_OTHERWISE = {
    "compare": {
        "method": "write the methods as words: steppe compare sgd arwp:ratio=.6",
        "seed": SEEDS,
    },
    "sweep": {"seed": SEEDS},
}
"""Settings that a command decides itself, and how to say what is meant."""


def command_class(name: str) -> Any:
    """The dataclass of a command's options."""
    module, _, kind = looked_up("command", name, COMMANDS).partition(":")
    return getattr(importlib.import_module(f"steppe.{module}"), kind)


def parse(name: str, arguments: list[str]) -> Any:
    """The command with its options; a recipe or config file gives the options' defaults."""
    kind = command_class(name)
    if not any(f.name == "settings" for f in dataclasses.fields(kind)):
        return _read(kind, name, arguments)
    wanted = [word for word in arguments if word not in ("-h", "--help")]
    for option, instead in GIVEN_OTHERWISE.get(name, {}).items():
        if any(word.split("=")[0] in (f"--{option}", option) for word in wanted if word != option):
            raise LabError(f"{name} does not take --{option}: {instead}.")
    first = _read(kind, name, wanted)
    if getattr(first, "resume", None) is not None and len(wanted) == len(arguments):
        allowed = ("--resume", "--store", "--quiet", "-q")
        others = [w for w in wanted if w.startswith("-") and w.split("=")[0] not in allowed]
        for word in [*([] if first.recipe is None else [f"the recipe {first.recipe}"]), *others]:
            raise LabError(
                f"{word} cannot change a resumed run, which keeps its own settings. Leave it out, "
                "or train a new run with steppe train --config RUN/config.json."
            )
        return first
    base = starting_point(name, first, wanted)
    shared = type(first.settings)(**vars(base))
    command = _read(kind, name, arguments, default=dataclasses.replace(kind(), settings=shared))
    return dataclasses.replace(command, settings=_settled(command, base, wanted))


def _read(kind: Any, name: str, arguments: list[str], **default: Any) -> Any:
    words = (inspect.getdoc(kind) or "").replace("Example:", "\n\nExample:").split("\n\n")
    # tyro joins lines, except before one that is indented
    wrapped = [textwrap.fill(" ".join(w.split()), 80, subsequent_indent="  ") for w in words]
    return tyro.cli(
        kind,
        prog=f"steppe {name}",
        description="\n\n".join(wrapped),
        args=arguments,
        config=(tyro.conf.DisallowNone,),
        **default,
    )


def starting_point(name: str, command: Any, words: list[str]) -> Config:
    """The config that a command's options change: of its recipe, its file, or the defaults.

    Only `compare` without any data, model, recipe or file takes a recipe by itself.
    """
    method = command.settings.method
    if command.config is not None:
        if command.recipe is not None:
            raise LabError("give a recipe or --config FILE, not both.")
        stored = read_config(command.config)
        return stored.replace(method=method) if _given("method", words, command.set) else stored
    chosen = command.recipe
    if chosen is None and name == "compare":
        own = any(_given(option, words, command.set) for option in ("data", "model"))
        chosen = None if own else "digits"
    return Config(method=method) if chosen is None else recipe(chosen, method)


def _settled(command: Any, base: Config, words: list[str]) -> Config:
    """The config after all options, with nothing that was asked for left out."""
    config = Config(**vars(command.settings)).replace(method=base.method)
    config = config.override(settings(command.set))
    if command.target is not None:
        config = config.replace(data_options={**config.data_options, "target": command.target})
    if _given("epochs", words, command.set):
        if _given("steps", words, command.set):
            raise LabError("give --epochs or --steps, not both.")
        config = config.replace(steps=None)  # those of the recipe
    return config


def _given(option: str, words: list[str], pairs: tuple[str, ...]) -> bool:
    """Whether a setting stands on the command line, as an option or behind --set."""
    flag = "--" + option.replace("_", "-")
    return any(word.split("=")[0] == flag for word in words) or option in settings(pairs)
