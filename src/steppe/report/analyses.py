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
from torch import Tensor

from steppe.analysis import Problem, Result
from steppe.analysis.problem import BatchNormMode
from steppe.lab import environment
from steppe.lab.errors import LabError, explained
from steppe.lab.problems import Sources, device, load_trained, training_batches
from steppe.lab.runs import Run

FOLDER = "analysis"
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
    whole = load_trained(run, sources)
    part = whole.data.train if split == "train" else whole.data.test
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(0))[:samples]
    x, y = next(iter(part.batches([order.sort().values], augment_seed=None)))
    with explained(run.name):
        return Problem(whole.model, whole.task.loss, (x, y), bn=bn)


def recalibration_batches(run: Run, samples: int, sources: Sources | None = None) -> list[Tensor]:
    """Inputs from the run's training pipeline, augmented, to recompute BatchNorm statistics from."""
    return training_batches(load_trained(run, sources), run.config, samples)


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
        "environment": environment.describe(device()),
    }
    target = folder / f"{name}.npz"
    target.unlink(missing_ok=True)  # a stop between the two files leaves no result, not a wrong one
    folder.mkdir(exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    result.save(target)
    for other in folder.glob(f".{name}-*.npz"):
        other.unlink()
    return Stored(run, result, about["request"], about["seconds"], about["environment"])
