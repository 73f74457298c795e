"""Analyses of stored runs: the problem behind a run, and results kept in the run's folder.

analysis/NAME.npz    the result, as `steppe.analysis` saves it
analysis/NAME.json   what was asked for, how long it took and where it ran
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from steppe.analysis import Problem, Result
from steppe.analysis.problem import BatchNormMode
from steppe.lab import environment
from steppe.lab.errors import LabError, explained
from steppe.lab.naming import GIVEN
from steppe.lab.problems import Sources, load_problem
from steppe.lab.runs import Run

FOLDER = "analysis"
KINDS = ("landscape", "spectrum", "radius", "sharpness")
Request = Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """The result of an analysis, and what is known about how it came to be."""

    run: Run
    result: Result
    request: Request
    seconds: float
    environment: Mapping[str, Any]


def problem_of(
    run: Run,
    samples: int = 1024,
    split: Literal["train", "test"] = "train",
    bn: BatchNormMode = "eval",
    sources: Sources | None = None,
) -> Problem:
    """A finished run's model and loss on fixed, un-augmented samples of its data.

    The samples are the same for all runs on the same data. `sources` brings back a model, data
    or task that came as Python objects.
    """
    if samples < 1:
        raise LabError(f"samples must be at least 1, got {samples}.")
    if run.status == "unfinished":
        raise LabError(f"{run.name} is not finished: steppe train --resume {run.folder}")
    if run.status == "diverged":
        raise LabError(f"{run.name} diverged, so there is no trained model to look at.")
    config = run.config
    given = [name for name in (config.data, config.model, config.task or "") if GIVEN in name]
    if given and sources is None:
        raise LabError(
            f"{run.name} used Python objects ({', '.join(given)}), which no file can bring back: "
            "in Python, steppe.report.analyses.problem_of(run, sources=…) takes them."
        )
    with torch.random.fork_rng(devices=[]):
        whole = load_problem(config.replace(init=None), sources or Sources())
    with explained(f"the model of {run.name}"):
        whole.model.load_state_dict(torch.load(run.model_file, weights_only=True))
    part = whole.data.train if split == "train" else whole.data.test
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(0))[:samples]
    x, y = next(iter(part.batches([order.sort().values], augment_seed=None)))
    with explained(run.name):
        return Problem(whole.model.to(_device()), whole.task.loss, (x, y), bn=bn)


def load(run: Run, name: str) -> Stored | None:
    """A stored analysis by name; None if there is none."""
    file = run.folder / FOLDER / f"{name}.npz"
    if not file.exists():
        return None
    try:
        about = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        result = Result.load(file)
    except (OSError, ValueError, KeyError) as error:
        raise LabError(f"{file} cannot be read ({error}). Delete it and analyse again.") from None
    return Stored(run, result, about["request"], about["seconds"], about["environment"])


def is_stored(run: Run, name: str, request: Request) -> bool:
    """Whether this very analysis was made before."""
    found = load(run, name)
    return found is not None and dict(found.request) == json.loads(json.dumps(dict(request)))


def perform(run: Run, name: str, request: Request, work: Callable[[Path], Result]) -> Stored:
    """Do an analysis and keep it, resuming an interrupted one with this request.

    `work` is given the file for its checkpoint.
    """
    folder = run.folder / FOLDER
    digest = hashlib.sha256(json.dumps(dict(request), sort_keys=True).encode()).hexdigest()[:12]
    begin = time.perf_counter()
    with explained(f"{name} of {run.name}"):
        result = work(folder / f".{name}-{digest}.npz")
    about: dict[str, Any] = {
        "request": dict(request),
        "seconds": round(time.perf_counter() - begin, 3),
        "environment": environment.describe(_device()),
    }
    target = folder / f"{name}.npz"
    target.unlink(missing_ok=True)  # a stop between the two files leaves no result, not a wrong one
    folder.mkdir(exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    result.save(target)
    for other in folder.glob(f".{name}-*.npz"):
        other.unlink()
    return Stored(run, result, about["request"], about["seconds"], about["environment"])


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
