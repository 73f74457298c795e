"""What the analyses cost, as ratios measured in one run on one thread.

    python benchmarks/analysis.py [product eigenvalue landscape] [--out FILE]
    python benchmarks/analysis.py --quick               # a smoke run for CI, numbers mean nothing

A ResNet-8 of about 76 k weights, 256 random images of 32x32 in batches of 64, trained for a few
steps so that its Hessian has outliers. The clock is the processor time of a one-threaded process.

- `product`: a Hessian product against PyHessian's, and against a forward, in turns.
- `eigenvalue`: products until the largest eigenvalue is right to 1e-3, and until each method stops
  by its own rule, of nets at several stages of training. Counts, not timings.
- `landscape`: a plane of 25x25 points against the naive loop of `benchmarks/plane.py`, in turns, each
  in a process of its own.

PyHessian takes part where it is installed (`pip install -c constraints.txt pyhessian`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import measure
from plane import trained

from steppe.analysis import Problem, top_eigs
from steppe.analysis.hessian import Hessian
from steppe.analysis.lanczos import Krylov

Work = Callable[[], object]
Batches = list[tuple[Tensor, Tensor]]
TOL = 1e-3
POWER_STEPS = 25


def ratio(times: dict[str, list[float]], above: str, below: str) -> dict[str, Any]:
    """Median and quartiles of the ratio within a round."""
    return measure.summary([a / b for a, b in zip(times[above], times[below], strict=True)])


def peer(model: nn.Module, batches: Batches) -> Any:
    """PyHessian's operator over several batches, or None where it is not installed."""
    try:
        from pyhessian import hessian
    except ImportError:
        return None
    return hessian(model, nn.CrossEntropyLoss(), dataloader=batches, cuda=False)


def product_times(problem: Problem, batches: Batches, rounds: int) -> dict[str, Any]:
    model = problem.model
    v = torch.randn(problem.size, dtype=torch.float64)
    with problem.replica() as replica:
        ours, double = Hessian(replica), Hessian(replica, "backward")

        def forward() -> None:
            with torch.no_grad():
                for xb, yb in batches:
                    F.cross_entropy(model(xb), yb)

        works: dict[str, Work] = {
            "ours": lambda: ours(v),
            "forward": forward,
            "double_backward": lambda: double(v),
        }
        theirs = peer(model, batches)
        if theirs is not None:
            parts = [torch.randn_like(p) for p in model.parameters()]
            works["pyhessian"] = lambda: theirs.dataloader_hv_product(parts)
        times = measure.in_turns(works, rounds, clock=time.process_time)
    others = [name for name in works if name != "ours"]
    return {
        "batches": f"{len(batches)} of {len(batches[0][0])}",
        "mode": ours.mode,
        "seconds": {
            name: measure.summary([t / 1e3 for t in values]) for name, values in times.items()
        },
        "ours_over": {name: ratio(times, "ours", name) for name in others},
        "bars": {"pyhessian": 1.0, "forward": 9.0},
    }


def needed(estimates: list[float], exact: float) -> int | None:
    """Products after which all estimates are right to TOL; None if the last one is not."""
    wrong = [i for i, value in enumerate(estimates) if abs(value - exact) > TOL * abs(exact)]
    first = wrong[-1] + 1 if wrong else 0
    return first + 1 if first < len(estimates) else None


def eigenvalue_products(quick: bool, seeds: int = 2) -> dict[str, Any]:
    """The largest eigenvalue of nets at several stages of training, from several random starts."""
    stages = {"untrained": 0, "trained 10 steps": 10, "trained 150 steps": 150}
    if quick:
        stages, seeds = {"trained 2 steps": 2}, 1
    results: dict[str, Any] = {}
    for stage, steps in stages.items():
        model, x, y = trained(steps, 32 if quick else 256)
        batches = list(zip(x.split(64), y.split(64), strict=True))
        problem = Problem(model, F.cross_entropy, (x, y))
        best = top_eigs(problem, 1 if quick else 2, tol=0.5 if quick else 1e-5)
        exact = best.values[0].item()
        searches = [our_search(problem, exact, seed, quick) for seed in range(seeds)]
        found = {"largest": best.values.tolist(), "residuals": best.residuals.tolist()}
        theirs = peer(model, batches)
        results[stage] = {**found, "top_eigs": searches}
        if theirs is not None:
            results[stage]["pyhessian"] = [
                their_search(theirs, exact, seed, quick) for seed in range(seeds)
            ]
        print(stage, json.dumps(results[stage]), flush=True)
    return {"tol": TOL, "stages": results}


def our_search(problem: Problem, exact: float, seed: int, quick: bool) -> dict[str, Any]:
    result = top_eigs(problem, tol=0.5 if quick else TOL, seed=seed)
    with problem.replica() as replica:
        hessian = Hessian(replica)
        krylov = Krylov(hessian.size, hessian.eps, seed)
        estimates = []
        for _ in range(result.products):
            krylov.step(hessian)
            estimates.append(krylov.ritz()[0][-1].item())
    error = abs(result.values[0].item() - exact) / abs(exact)
    return {"needed": needed(estimates, exact), "stopped": result.products, "error": error}


def their_search(theirs: Any, exact: float, seed: int, quick: bool) -> dict[str, Any]:
    """Their loop, listened to and not stopped; then where its own rule would have stopped it."""
    product = theirs.dataloader_hv_product
    estimates: list[float] = []

    def heard(v: list[Tensor]) -> Any:
        value, Hv = product(v)
        estimates.append(float(value))
        return value, Hv

    theirs.dataloader_hv_product = heard
    try:
        torch.manual_seed(seed)
        theirs.eigenvalues(maxIter=2 if quick else POWER_STEPS, tol=0.0)
    finally:
        theirs.dataloader_hv_product = product
    # It stops when the relative change is below tol, and returns the value before the change.
    changes = [abs(a - b) / (abs(a) + 1e-6) for a, b in pairwise(estimates)]
    last = next((i for i, change in enumerate(changes) if change < TOL), None)
    result: dict[str, Any] = {"needed": needed(estimates, exact), "stopped": None, "error": None}
    if last is not None:
        error = abs(estimates[last] - exact) / abs(exact)
        result |= {"stopped": last + 2, "error": error}
    return result


def plane(who: str, grid: int, quick: bool) -> dict[str, Any]:
    """Seconds and losses of one plane in a process of its own."""
    command = [sys.executable, str(Path(__file__).parent / "plane.py"), who, "--grid", str(grid)]
    command += ["--samples", "32", "--steps", "2"] if quick else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def landscape_times(grid: int, rounds: int, quick: bool) -> dict[str, Any]:
    """Whole planes in turns."""
    seconds: dict[str, list[float]] = {"ours": [], "naive": []}
    for _ in range(rounds):
        planes = {who: plane(who, grid, quick) for who in seconds}
        for who, found in planes.items():
            seconds[who].append(found["seconds"])
        print({who: values[-1] for who, values in seconds.items()}, flush=True)
    ours, theirs = (torch.tensor(planes[who]["loss"]).double() for who in ("ours", "naive"))
    return {
        "grid": grid,
        "naive": "a TensorDataset, batch 128",
        "seconds": seconds,
        "naive_over_ours": ratio(seconds, "naive", "ours"),
        "ms_a_point_ours": [1e3 * s / grid**2 for s in seconds["ours"]],
        "largest_relative_difference": float(((ours - theirs) / theirs).abs().max()),
        "bar": 3.0,
    }


def main() -> None:
    parser = measure.parser(__doc__, "a smoke run: numbers mean nothing")
    known = ("product", "eigenvalue", "landscape")
    parser.add_argument("sections", nargs="*", default=list(known), help=f"of {', '.join(known)}")
    parser.add_argument("--grid", type=int, default=25, help="points of a side of the landscape")
    parser.add_argument("--rounds", type=int, default=1, help="of whole landscapes")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(known):
        parser.error(f"unknown section {', '.join(unknown)}; known are {', '.join(known)}")
    torch.set_num_threads(1)
    quick = options.quick
    crowded = measure.busy()
    # Sections take minutes each and may be measured one by one; each says when.
    stored = {} if quick else measure.stored("analysis", options.out)
    report: dict[str, Any] = {k: v for k, v in stored.items() if k in known}
    model, x, y = trained(2 if quick else 150, 32 if quick else 256)
    problem = Problem(model, F.cross_entropy, (x, y))
    size = 16 if quick else 64
    batches = list(zip(x.split(size), y.split(size), strict=True))
    grid, rounds = (2, 1) if quick else (options.grid, options.rounds)
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "product": lambda: product_times(problem, batches, 1 if quick else 15),
        "eigenvalue": lambda: eigenvalue_products(quick),
        "landscape": lambda: landscape_times(grid, rounds, quick),
    }
    for name in options.sections:
        report[name] = {**works[name](), "measured": measure.environment()}
    print(json.dumps({name: report[name] for name in options.sections}, indent=2))
    timed = set(options.sections) & {"product", "landscape"}
    net = {"network": "ResNet-8, width 16", "parameters": problem.size, "samples": len(x)}
    found = {"threads": 1, "clock": "processor seconds", "quick": quick, **net, **report}
    measure.publish("analysis", found, options.out, bool(timed) and crowded)


if __name__ == "__main__":
    main()
