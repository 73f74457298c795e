"""The lab: data, models, training and comparison, from Python and from the command line."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.lab import data, models, tasks
    from steppe.lab.comparison import Comparison, compare
    from steppe.lab.config import Config, read_config
    from steppe.lab.errors import DivergedError, Interrupted, LabError
    from steppe.lab.problems import Sources
    from steppe.lab.progress import Event
    from steppe.lab.recipes import recipe
    from steppe.lab.results import Result
    from steppe.lab.sweeps import sweep
    from steppe.lab.tasks import Task
    from steppe.lab.training import train
    from steppe.lab.tuning import Tune

__all__ = [
    "Comparison",
    "Config",
    "DivergedError",
    "Event",
    "Interrupted",
    "LabError",
    "Result",
    "Sources",
    "Task",
    "Tune",
    "compare",
    "data",
    "models",
    "read_config",
    "recipe",
    "sweep",
    "tasks",
    "train",
]

_HOMES = {
    "comparison": ("Comparison", "compare"),
    "config": ("Config", "read_config"),
    "errors": ("DivergedError", "Interrupted", "LabError"),
    "problems": ("Sources",),
    "progress": ("Event",),
    "recipes": ("recipe",),
    "results": ("Result",),
    "sweeps": ("sweep",),
    "tasks": ("Task",),
    "training": ("train",),
    "tuning": ("Tune",),
}
"""Where the public names are defined; they are imported when first used."""


def __getattr__(name: str) -> Any:
    if name in ("data", "models", "tasks"):
        return importlib.import_module(f"steppe.lab.{name}")
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"steppe.lab.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'steppe.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
