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

_PACKAGES = ("data", "models", "tasks")
_MODULES = (
    *("errors", "config", "recipes", "tuning", "results"),
    *("training", "engines", "comparison", "sweeps"),
)
"""Where the other public names are, defined or imported; those without torch come first."""


def __getattr__(name: str) -> Any:
    """Public names, imported when first used: `steppe compare --help` needs no torch."""
    if name in _PACKAGES:
        return importlib.import_module(f"steppe.lab.{name}")
    for module in _MODULES if name in __all__ else ():
        found = vars(importlib.import_module(f"steppe.lab.{module}"))
        if name in found:
            globals()[name] = found[name]
            return found[name]
    raise AttributeError(f"module 'steppe.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
