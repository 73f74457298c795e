"""What is measured at the minimum a run has found, before its weights are dropped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from steppe import analysis
from steppe.analysis.radius import radius_at
from steppe.lab.compression import compress
from steppe.lab.results import Result
from steppe.lab.runs import Record, Run
from steppe.report.analyses import problem_of

FILE = "minima.json"
SAMPLES = 512
RHO = 0.5
"""The radius of adaptive sharpness, in units of |w| (ASAM's usual one)."""
GRID = 17
RISE = 0.1
"""The rise of the loss at which radii are compared."""
RADII = tuple(float(f"{0.01 * 3000 ** (i / 11):.3g}") for i in range(12))
"""From 0.01 to 30, evenly on a logarithmic scale."""


def measure(
    result: Result,
    curvature: bool = True,
    robust: bool = False,
    landscape: bool = False,
    radius: bool = False,
    samples: int = SAMPLES,
) -> None:
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
                problem = problem_of(run, samples, bn="recalibrate")
                try:
                    found = _measured(problem, landscape, radius)
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


def _measured(problem: analysis.Problem, landscape: bool, radius: bool) -> Record:
    eigs = analysis.top_eigs(problem, k=1, tol=0.01, progress=False)
    rise, average = (
        analysis.sharpness(problem, RHO, case, adaptive=True, progress=False)
        for case in ("worst", "average")
    )
    norms = [float(w.detach().norm()) for w in problem.model.parameters() if w.requires_grad]
    found = {
        "samples": problem.samples,
        "bn": "recalibrate",
        "largest_eigenvalue": rounded(eigs.values[0]),
        "eigenvalue_residual": rounded(eigs.residuals[0]),
        "adaptive_sharpness": rounded(rise.value),
        "average_sharpness": rounded(average.value),
        "sharpness_rho": RHO,
        "weight_norm": rounded(math.hypot(*norms)),
    }
    if landscape:
        found["landscape"] = _landscape(problem)
    if radius:
        found["radius"] = _radius(problem)
    return found


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


def _landscape(problem: analysis.Problem) -> Record:
    made = analysis.landscape(problem, GRID, progress=False)
    return {"a": rounded(made.a), "loss": rounded(made.loss), "centre": rounded(made.centre)}


def _radius(problem: analysis.Problem) -> Record:
    kinds = ("random", "sam")
    made = analysis.perturbation_curve(problem, RADII, kinds, 128, directions=8, progress=False)
    names = ("radii", "loss", "error")
    return {
        **{name: rounded(getattr(made, name)) for name in names},
        "base": rounded(made.base),
        "kinds": list(made.kinds),
        "batch": made.batch,
        "directions": made.directions,
    }


def rounded(value: Any) -> Any:
    """Numbers to four digits, as JSON can hold them; what is not finite becomes None."""
    if isinstance(value, Tensor):
        return rounded(value.tolist())
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if math.isfinite(value) else None


def radius_words(curve: Mapping[str, Any]) -> str:
    """How much further a random perturbation goes than an adversarial one, for the same rise."""
    reached = {
        kind: radius_at(
            curve["radii"], [x if x is None else x - curve["base"] for x in losses], RISE
        )
        for kind, losses in zip(curve["kinds"], curve["loss"], strict=True)
    }
    random, ascent = reached["random"], reached["sam"]
    if math.isinf(random) or math.isinf(ascent):
        return f"The loss of the baseline of seed 0 does not rise by {RISE:g} within the radii measured."
    return (
        f"The loss of the baseline of seed 0 rises by {RISE:g} at radius {random:.3g} in random directions "
        f"and {ascent:.3g} along the gradient of {curve['batch']} samples: {random / ascent:.3g} times as far (n = 1)."
    )
