"""What is measured at the minimum a run has found, before its weights are dropped."""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from steppe import analysis
from steppe.analysis.sharpness import Kind
from steppe.lab.compression import compress
from steppe.lab.results import Result
from steppe.lab.runs import Record, Run
from steppe.report.analyses import problem_of

FILE = "minima.json"
SAMPLES = 512
RHO = 0.5
"""The radius of adaptive sharpness, in units of |w| (ASAM's usual one), and of its plain average."""
PLAIN = 0.05
"""The radius of plain sharpness at worst (SAM's usual one)."""
SHARPNESS: tuple[tuple[str, float, Kind, bool], ...] = (
    ("adaptive_sharpness", RHO, "worst", True),
    ("average_sharpness", RHO, "average", True),
    ("plain_sharpness", PLAIN, "worst", False),
    ("plain_average", RHO, "average", False),
)
"""Name, radius, case and whether it is adaptive. The plain average is the Hessian's trace, times rho²/2d."""


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
    finished, threads = result.status == "finished", torch.get_num_threads()
    torch.set_num_threads(result.config.threads or threads)  # other runs want the other cores
    try:
        found = _curvature(run) if finished and curvature else {}
        if finished and robust:
            found["robustness"] = _robustness(run, result.metric)
    finally:
        torch.set_num_threads(threads)
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


def _curvature(run: Run) -> Record:
    problem = problem_of(run, SAMPLES, bn="recalibrate")
    try:
        eigs = analysis.top_eigs(problem, k=1, tol=0.01, progress=False)
        sharpness = {
            name: analysis.sharpness(problem, rho, case, adaptive=adaptive, progress=False).value
            for name, rho, case, adaptive in SHARPNESS
        }
    except (ValueError, RuntimeError) as error:  # one broken model must not end a study
        return {"failed": str(error).partition("\n")[0]}
    norms = [float(w.detach().norm()) for w in problem.model.parameters() if w.requires_grad]
    return {
        "samples": problem.samples,
        "bn": "recalibrate",
        "largest_eigenvalue": rounded(eigs.values[0]),
        "eigenvalue_residual": rounded(eigs.residuals[0]),
        **{name: rounded(value) for name, value in sharpness.items()},
        "sharpness_rho": RHO,
        "plain_rho": PLAIN,
        "weight_norm": rounded(math.hypot(*norms)),
    }


def read(run: Run) -> Record:
    """What `measure` has written; nothing where it was not asked to."""
    file = run.folder / FILE
    content: Record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content


def rounded(value: float | Tensor) -> float | None:
    """To four digits, as JSON can hold it; what is not finite becomes None."""
    return float(f"{float(value):.4g}") if math.isfinite(value) else None
