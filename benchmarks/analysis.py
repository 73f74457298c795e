"""What the analyses cost, as ratios measured in one interleaved run on one thread.

    python benchmarks/analysis.py -o analysis.json      # some ten minutes on an idle core
    python benchmarks/analysis.py --quick               # a smoke run for CI, numbers mean nothing

A ResNet-8 of about 76 k weights, 256 random images of 32x32 in batches of 64, trained for a few
steps so that its Hessian has outliers. Times on a shared machine drift: the clock is the
processor time of this one-threaded process, and each ratio is the median over rounds in which
both sides run one after the other. PyHessian takes part where it
is installed (`pip install pyhessian`) and is left out with a note where it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from steppe.analysis import Problem, landscape, top_eigs
from steppe.analysis.directions import filter_normalised
from steppe.analysis.hessian import Hessian

Work = Callable[[], object]


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            self.short = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.short(x))


def resnet8() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def trained(steps: int, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A net that has learned which of ten smooth patterns lies under the noise of an image."""
    torch.manual_seed(0)
    model = resnet8()
    y = torch.randint(10, (samples,))
    patterns = F.interpolate(torch.randn(10, 3, 4, 4), size=32, mode="bilinear")
    x = patterns[y] + torch.randn(samples, 3, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        rows = torch.arange(64) + 64 * step
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows % samples]), y[rows % samples]).backward()
        optimizer.step()
    return model.eval(), x, y


def interleaved(rounds: int, **works: Work) -> dict[str, list[float]]:
    """Processor seconds of each work in each round, all works of a round after each other."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            start = time.process_time()
            work()
            times[name].append(time.process_time() - start)
    return times


def ratio(times: dict[str, list[float]], above: str, below: str) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in zip(times[above], times[below], strict=True))
    return {
        "median": statistics.median(ratios),
        "low": ratios[0],
        "high": ratios[-1],
        "n": len(ratios),
        f"{above}_s": statistics.median(times[above]),
        f"{below}_s": statistics.median(times[below]),
    }


def peer(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """PyHessian's operator, or None where it is not installed."""
    try:
        from pyhessian import hessian
    except ImportError:
        return None
    # Its single-batch form keeps the graph of the gradient; several batches go by a loader.
    if len(batches) == 1:
        return hessian(model, nn.CrossEntropyLoss(), data=batches[0], cuda=False)
    return hessian(model, nn.CrossEntropyLoss(), dataloader=batches, cuda=False)


def product_times(problem: Problem, batches: list[tuple[Tensor, Tensor]], rounds: int) -> dict:
    model = problem.model
    results: dict[str, Any] = {}
    v = torch.randn(problem.size, dtype=torch.float64)
    with problem.replica() as replica:
        ours, double = Hessian(replica), Hessian(replica, "backward")

        def forward() -> None:
            with torch.no_grad():
                for xb, yb in batches:
                    F.cross_entropy(model(xb), yb)

        works: dict[str, Work] = {
            "product": lambda: ours(v),
            "forward": forward,
            "own_forward": replica.evaluate,
            "double_backward": lambda: double(v),
        }
        theirs = peer(model, batches)
        if theirs is not None:
            parts = [torch.randn_like(p) for p in model.parameters()]
            works["pyhessian"] = lambda: theirs.dataloader_hv_product(parts)
        times = interleaved(rounds, **works)
    results["product_per_forward"] = ratio(times, "product", "forward")
    results["product_per_own_forward"] = ratio(times, "product", "own_forward")
    results["product_per_double_backward"] = ratio(times, "product", "double_backward")
    results["mode"] = ours.mode
    if theirs is not None:
        results["product_per_pyhessian"] = ratio(times, "product", "pyhessian")
    return results


def eigenvalue_products(problem: Problem, batches: list[tuple[Tensor, Tensor]], most: int) -> dict:
    """Products spent until the largest eigenvalue is right to 1e-3."""
    exact = top_eigs(problem, tol=1e-6 if most > 2 else 0.5).values[0].item()
    ours = top_eigs(problem, tol=1e-3 if most > 2 else 0.5)
    results = {
        "largest": exact,
        "ours": ours.products,
        "our_error": abs(ours.values[0].item() - exact) / exact,
    }
    theirs = peer(problem.model, batches)
    if theirs is not None:
        count = 0
        product = theirs.dataloader_hv_product

        def counted(v: list[Tensor]) -> Any:
            nonlocal count
            count += 1
            return product(v)

        theirs.dataloader_hv_product = counted
        values, _ = theirs.eigenvalues(maxIter=most, tol=1e-3)
        results |= {"pyhessian": count, "pyhessian_error": abs(values[0] - exact) / exact}
    return results


def landscape_times(problem: Problem, n: int, rounds: int) -> dict[str, Any]:
    """Our landscape against what one writes first: load_state_dict and a DataLoader."""
    model, (x, y) = problem.model, problem.data
    loader = DataLoader(TensorDataset(x, y), batch_size=128)
    names = [name for name, _ in model.named_parameters()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    centre = [state[name] for name in names]
    d1, d2 = (filter_normalised(centre, seed) for seed in (0, 1))
    axis = torch.linspace(-1, 1, n, dtype=torch.float64).tolist()
    surface = torch.zeros(n, n, dtype=torch.float64)

    def naive() -> None:
        with torch.no_grad():
            for i, a in enumerate(axis):
                for j, b in enumerate(axis):
                    moved = zip(names, centre, d1, d2, strict=True)
                    point = {name: w + a * u + b * v for name, w, u, v in moved}
                    model.load_state_dict({**state, **point})
                    total = sum(F.cross_entropy(model(p), q).item() * len(p) for p, q in loader)
                    surface[i, j] = total / len(x)
        model.load_state_dict(state)

    ours: list[Tensor] = []
    times = interleaved(
        rounds, naive=naive, landscape=lambda: ours.append(landscape(problem, n=n).loss)
    )
    result = ratio(times, "naive", "landscape")
    result["largest_relative_difference"] = float(((ours[-1] - surface) / surface).abs().max())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers mean nothing")
    parser.add_argument("--grid", type=int, default=25, help="points of a side of the landscape")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the landscapes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quick = options.quick
    samples, size, grid, rounds = 256, 64, options.grid, options.rounds
    if quick:
        samples, size, grid, rounds = 32, 16, 2, 1
    model, x, y = trained(steps=2 if quick else 150, samples=samples)
    problem = Problem(model, F.cross_entropy, (x, y), microbatch=64)
    batches = list(zip(x.split(size), y.split(size), strict=True))
    report: dict[str, Any] = {
        "quick": quick,
        "parameters": problem.size,
        "samples": samples,
        "grid": grid,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "loss": problem.value(),
    }
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "product": lambda: product_times(problem, batches, 1 if quick else 4 * rounds),
        "landscape": lambda: landscape_times(problem, grid, rounds),
        "eigenvalue": lambda: eigenvalue_products(problem, batches, 2 if quick else 100),
    }
    for name, section in sections.items():
        # Written after each: a run that is cut short keeps what it has measured.
        report[name] = {**section(), "load": os.getloadavg()}
        text = json.dumps(report, indent=2)
        if options.output:
            options.output.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
