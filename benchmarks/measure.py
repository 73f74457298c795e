"""What the benchmarks share: turns, medians with their spread, where a number came from, JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import steppe
from steppe.passes import Run
from steppe.schedules import PERIOD, REST

RESULTS = Path(__file__).parent / "results"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
CYCLE = math.lcm(PERIOD, REST)
"""Steps after which those with a rise repeat: which are measured, and which rest."""
Step = Callable[[], object]
METHODS = {
    "RWP": steppe.rwp(0.01),
    "ARWP": steppe.arwp(0.01),
    "m-RWP": steppe.m_rwp(0.015),
    "m-ARWP": steppe.m_arwp(0.015),
    "SAM": steppe.sam(0.05),
    "ASAM": steppe.asam(0.5),
    "MSAM": steppe.msam(3.0),
}


def parser(doc: str, quick: str) -> argparse.ArgumentParser:
    """What every benchmark understands; `quick` says what is left of it then."""
    found = argparse.ArgumentParser(description=doc.splitlines()[0])
    found.add_argument("--quick", action="store_true", help=quick)
    found.add_argument("--out", type=Path, help="where to write the JSON")
    return found


def environment() -> dict[str, Any]:
    """Machine, versions, load and date: no number without them."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "steppe": steppe.__version__,
        "load": round(load, 2),
        "date": datetime.now(UTC).date().isoformat(),
    }


def busy(seconds: float = 2.0) -> bool:
    """Whether others use the machine so much that its timings should not be published.

    Half a core within the next two seconds is too much. The load average, which would still remember
    our own last benchmark, is asked only where there is no /proc/stat.
    """
    if not Path("/proc/stat").exists():
        return hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5
    used, before = _used_seconds(), time.perf_counter()
    time.sleep(seconds)
    return (_used_seconds() - used) / (time.perf_counter() - before) > 0.5


def _used_seconds() -> float:
    """Processor time that all processes together have used since the machine started."""
    ticks = [int(t) for t in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def in_turns(contenders: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds per call: A, B, A, B, …; one turn before these warms up and compiles."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, call in contenders.items():
            begin = time.perf_counter()
            call()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


class Bench:
    """A network, its optimizer, loss and batch: each contender has its own."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor], *batch: Tensor, momentum: float = 0.9
    ) -> None:
        self.model, self.batch = model, batch
        self.loss = lambda *inputs: loss(model, *inputs)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)

    def backward(self) -> None:
        self.loss(*self.batch).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain_step(self) -> None:
        self.backward()
        self.update()

    def step_with(self, method: steppe.Method) -> Step:
        perturber = steppe.attach(self.model, self.optimizer, method)
        after_the_opening(perturber)
        batches = [self.batch] * method.batches_needed

        def step() -> None:
            perturber.backward(self.loss, *batches)
            self.update()

        return step

    def added_by(self, method: steppe.Method) -> Step:
        """Only what a one-pass method adds to a step, on gradients that are already there."""
        perturber = steppe.attach(self.model, self.optimizer, method)
        self.backward()
        return added_by(perturber)


def after_the_opening(perturber: steppe.Perturber) -> None:
    """With a rise every step of the opening is measured, and later ones now and then: take these."""
    training = perturber._training
    training.number = 2 * CYCLE * training.method.steered
    training.new_step()


def added_by(perturber: steppe.Perturber) -> Step:
    """What a one-pass method adds to a step: move, put back, learn from the gradients there are. With a
    rise it differs from step to step: `CYCLE` of them a call, after the opening, with what is measured."""
    training = perturber._training
    steered = training.method.steered
    outputs = torch.ones(128, 10, device=training.weights.device)
    after_the_opening(perturber)

    def step() -> None:
        for _ in range(CYCLE if steered else 1):
            run = Run(training, 0, 1.0, held=False)
            training.new_step()
            training.begin(run)
            if training.step.metered:
                run.pull = outputs.abs().sum()
                training.step.close(run)
            training.restore()
            training.step.done = [0]
            training.step.settle()
            training.number += steered

    return step


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of some measurements."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return {
        "median": statistics.median(ordered),
        "low": ordered[quarter],
        "high": ordered[-1 - quarter],
        "n": len(ordered),
    }


def stored(name: str, out: Path | None = None) -> dict[str, Any]:
    """What `write` has saved before, or nothing."""
    path = out or RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def show(times: Mapping[str, Sequence[float]], unit: str) -> dict[str, dict[str, float]]:
    """Print median, quartiles, n and the multiple of the first one's median, and give them."""
    found = {name: summary(values) for name, values in times.items()}
    first = next(iter(found.values()))["median"]
    for name, s in found.items():
        quartiles = f"[{s['low']:.3f}, {s['high']:.3f}], n = {s['n']:.0f}"
        print(f"{name:42}{s['median']:10.3f} {unit} {quartiles}, × {s['median'] / first:.3f}")
    return found


def publish(name: str, result: dict[str, Any], out: Path | None, crowded: bool) -> None:
    """Write timings among the published ones, unless the machine was busy; to `out` in any case."""
    if crowded and out is None:
        print("\nThe machine was busy before the run: not published (give --out to keep it).")
        return
    print("\nwritten to", write(name, result, out))


def write(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Save a result as JSON, by default among the published ones."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(), **result}, indent=2) + "\n", encoding="utf-8")
    return path
