"""Analyses of stored runs: the problem behind a run, results kept in its folder, and in words.

analysis/NAME.npz    the result, as `steppe.analysis` saves it
analysis/NAME.json   what was asked for, how long it took and where it ran
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from steppe import analysis
from steppe.analysis import Problem, Result
from steppe.analysis.problem import BatchNormMode
from steppe.analysis.robustness_result import moved_words
from steppe.lab import environment
from steppe.lab.errors import LabError, explained
from steppe.lab.problems import Sources, device, load_trained
from steppe.lab.runs import Run
from steppe.report.charts import shown_within

FOLDER = "analysis"
Request = Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """The result of an analysis, and what is known about how it came to be."""

    run: Run
    result: Result
    about: Mapping[str, Any]
    """`request`, `seconds` and `environment`."""


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
    return Stored(run, result, about)


def is_stored(run: Run, name: str, request: Request) -> bool:
    """Whether this very analysis was made before."""
    found = load(run, name)
    return found is not None and found.about["request"] == json.loads(json.dumps(dict(request)))


def perform(run: Run, name: str, request: Request, work: Callable[[], Result]) -> Result:
    """Do an analysis and keep it."""
    folder = run.folder / FOLDER
    begin = time.perf_counter()
    with explained(f"{name} of {run.name}"):
        result = work()
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
    return result


def described(result: Result) -> str:
    """The outcome in a few words."""
    match result:
        case analysis.Landscape():
            finite = result.loss[result.loss.isfinite()]
            top = float(finite.max()) if len(finite) else math.nan
            holes = f", {result.holes} not finite" if result.holes else ""
            return f"loss {result.centre:.4g} at the centre, up to {top:.4g}{holes}"
        case analysis.Spectrum():
            return (
                f"largest eigenvalue {shown_within(result.largest, result.largest_residual)}, "
                f"trace {result.trace:.4g} ± {result.trace_error:.1g}"
            )
        case analysis.RadiusCurve():
            ends = zip(result.kinds, result.loss[:, -1].tolist(), strict=True)
            last = ", ".join(f"{kind} {loss:.4g}" for kind, loss in ends)
            return f"loss {result.base:.4g}; at radius {float(result.radii[-1]):g}: {last}"
        case analysis.Sharpness():
            rise = f"{result.value:.4g} ± {result.error:.1g}"
            return f"{result.case} rise {rise} at rho {result.rho:g}"
        case analysis.Robustness():
            return _survived(result)
        case analysis.Ensemble():
            (nll, right, ece), mean = result.single.tolist(), result.averaged[-1].tolist()
            return (
                f"NLL {nll:.4g} -> {mean[0]:.4g}, accuracy {100 * right:.4g} -> {100 * mean[1]:.4g}, ECE "
                f"{100 * ece:.3g} -> {100 * mean[2]:.3g} with {len(result.averaged)} draws"
            )
    return type(result).__name__


def _survived(result: analysis.Robustness) -> str:
    """Accuracy as it is and after the changes that tables show."""
    metric, said = 100 * result.accuracy, "accuracy"
    if bool(metric.isnan().all()):
        metric, said = result.loss, "loss"
    parts = [f"{said} {_each(metric[:, 0])}"]
    for change in (analysis.Rounding(4), analysis.Rounding(3), analysis.Pruning(0.8)):
        if (place := result.place(change)) is not None:
            name = result.labels[place].partition(",")[0]
            parts.append(f"{name} {_each(metric[:, place])}")
    if result.borne:
        parts.append("noise borne " + " / ".join(f"{ratio:g}" for ratio in result.borne.values()))
    several = f" ({' / '.join(result.statistics)})" if len(result.statistics) > 1 else ""
    moved = moved_words({"": result.recalibration_shift})
    return ", ".join(parts) + several + f". {moved}" * bool(moved)


def _each(values: Tensor) -> str:
    return " / ".join(f"{value:.4g}" for value in values.tolist())
