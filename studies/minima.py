"""What is measured at the minimum a run has found, before its weights are dropped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from steppe import analysis
from steppe.lab.compression import compress
from steppe.lab.results import Result
from steppe.lab.runs import Record, Run
from steppe.report.analyses import problem_of

FILE = "minima.json"
SAMPLES = 512
RHO = 0.5
"""The radius of adaptive sharpness, in units of |w| (ASAM's usual one)."""


def measure(result: Result, curvature: bool = True, robust: bool = False) -> None:
    """Write what a finished run's model is like into its folder.

    `robust`: accuracy on test data after rounding and pruning. `curvature`: curvature, sharpness and
    weight norm, on fixed, un-augmented training samples, with BatchNorm statistics recomputed on them wherever
    the weights are: those stored by training under noise belong to other weights. Where that fails,
    the reason is written instead, and the page shows it.
    """
    assert result.folder is not None
    run = Run(result.folder)
    if (run.folder / FILE).exists():
        return
    found: Record = {}
    if result.status == "finished":
        with _threads(result.config.threads):
            if curvature:
                problem = problem_of(run, SAMPLES, bn="recalibrate")
                try:
                    found = _measured(problem)
                except (ValueError, RuntimeError) as error:  # one broken model must not end a study
                    found = {"failed": str(error).partition("\n")[0]}
            if robust:
                found["robustness"] = _robustness(run, result.metric)
    run.write_json(FILE, found)


def _robustness(run: Run, metric: str) -> Record:
    """Test accuracy by change, with BatchNorm's statistics recomputed after it where there are any.

    The same with the stored statistics is beside it, under `as is`.
    """
    found = {
        statistics: {name.partition(",")[0]: rounded(after[metric]) for name, after in each.items()}
        for statistics, each in compress(run).items()
    }
    return {**found.pop("recalibrated"), **found} if len(found) > 1 else found["as is"]


def _measured(problem: analysis.Problem) -> Record:
    eigs = analysis.top_eigs(problem, k=1, tol=0.01, progress=False)
    rise, average = (
        analysis.sharpness(problem, RHO, case, adaptive=True, progress=False)
        for case in ("worst", "average")
    )
    norms = [float(w.detach().norm()) for w in problem.model.parameters() if w.requires_grad]
    return {
        "samples": problem.samples,
        "bn": "recalibrate",
        "largest_eigenvalue": rounded(eigs.values[0]),
        "eigenvalue_residual": rounded(eigs.residuals[0]),
        "adaptive_sharpness": rounded(rise.value),
        "average_sharpness": rounded(average.value),
        "sharpness_rho": RHO,
        "weight_norm": rounded(math.hypot(*norms)),
    }


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """As many threads as the training had: other runs want the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read(run: Run) -> Record:
    """What `measure` has written; nothing where it was not asked to."""
    file = run.folder / FILE
    content: Record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content


def rounded(value: Any) -> Any:
    """Numbers to four digits, as JSON can hold them; what is not finite becomes None."""
    if isinstance(value, Tensor):
        return rounded(value.tolist())
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if math.isfinite(value) else None
