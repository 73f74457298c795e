"""The lab: data, models, training and comparison, from Python and from the command line."""

from steppe.lab import data, models, tasks
from steppe.lab.comparison import Comparison, compare
from steppe.lab.config import Config, read_config
from steppe.lab.errors import DivergedError, Interrupted, LabError
from steppe.lab.problems import Sources
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
