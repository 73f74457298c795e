"""One training of `rise.py` on a setting, what is measured in it, and the lines of those that are done.

The loop is a user's own: hooks, one backward for each batch, no call to steppe at the end.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rise_settings import SETTINGS, Problem
from torch import Tensor, nn

import steppe
from steppe.analysis.changes import Change, Pruning, Rounding
from steppe.analysis.robustness import changed_weights
from steppe.lab import data
from steppe.methods import Method, Pass, mixed
from steppe.noise import Draw
from steppe.perturbations import AdaptiveGaussian, Gaussian
from steppe.schedules import BASE, KEPT, LEAST, MOST, Steering

PROBED = 2
"""So many seeds of a setting compare the meter with a direct measurement."""


@dataclass(frozen=True)
class Run:
    """One training. `strength` is a rise, or msam's rho; `baseline` sees one batch a step, or two."""

    setting: str
    method: str
    strength: float
    power: int
    bound: float
    seed: int

    @property
    def batches(self) -> int:
        return 2 if self.method in ("m_rwp", "baseline, two") else 1

    @property
    def baseline(self) -> Run:
        name = "baseline, two" if self.batches == 2 else "baseline"
        return Run(self.setting, name, 0.0, 0, 0.0, self.seed)

    def build(self) -> Method | None:
        if self.method.startswith("baseline"):
            return None
        if self.method == "msam":
            return steppe.msam(self.strength)
        if self.method == "arwp":
            return steppe.arwp(rise=self.strength)
        kind = RampedRatio if self.method == "ramped ratio" else Steering
        noise = Tried(rise=self.strength, power=self.power, bound=self.bound, kind=kind)
        one = Method("rwp", (Pass(noise),))
        return mixed(one) if self.method == "m_rwp" else one


Lines = Mapping[Run, Mapping[str, Any]]


class RampedRatio(Steering):
    """The ramp alone: `rise` holds a fixed relative displacement."""

    def init(self, like: Tensor) -> Tensor:
        state = super().init(like)
        state[BASE] = self.asked(0)
        return state

    def update(self, state: Tensor, *learnt: Any) -> None:
        super().update(state, *learnt)
        state[BASE] = self.asked(0)
        state[-1] = (state[BASE] * self.ramp(state).sqrt()).clamp(min=LEAST)


@dataclass(frozen=True)
class Tried(Gaussian):
    """Gaussian noise whose ramp and bound are given."""

    power: int = 4
    bound: float = 0.5
    kind: type[Steering] = Steering

    @property
    def steering(self) -> Steering:
        assert self.rise is not None
        return self.kind(self.rise, self.bound, self.power)


class EqualShares:
    """Scales the noise of each parameter until all take the same share of the rise: a_p² C_p is the same,
    C_p the curvature that the parameter's own part of the meter shows. At most 5 times from the mean."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [{**g, "params": [p]} for g in optimizer.param_groups for p in g["params"]]
        self.groups = optimizer.param_groups[:] = groups
        self.params = [group["params"][0] for group in groups]
        self.slopes = torch.zeros(len(groups))
        self.scales, self.num, self.den = torch.ones(len(groups)), self.slopes.clone(), 0.0
        self.true = [p.detach().clone() for p in self.params]
        for number, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(partial(self._measure, number))

    def _measure(self, number: int, param: Tensor) -> None:
        assert param.grad is not None
        self.slopes[number] = torch.sum((param.detach() - self.true[number]) * param.grad)

    def after(self, ratio: float) -> None:
        """The step is taken; `ratio` was its r."""
        for true, param in zip(self.true, self.params, strict=True):
            true.copy_(param.detach())
        if not self.slopes.any():  # a step at rest
            return
        self.num = KEPT * self.num + (1 - KEPT) * self.slopes
        self.den = KEPT * self.den + (1 - KEPT) * (ratio * self.scales) ** 2
        logs = (self.den / self.num.clamp(min=1e-30)).log() / 2
        known = self.num > 0
        logs = (logs - logs[known].mean()).clamp(-math.log(5), math.log(5))
        now = self.scales.log()
        self.scales = torch.where(known, now + (logs - now).clamp(-MOST, MOST), now).exp()
        for group, scale in zip(self.groups, self.scales.tolist(), strict=True):
            group["strength"] = scale


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return F.mse_loss(output.flatten(), y)
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Per cent of accuracy or of variance explained; for language, minus the nats."""
    model.eval()
    output = torch.cat([model(part) for part in x.split(500)])
    model.train()
    if y.is_floating_point():
        return 100 * float(1 - loss_of(output, y) / y.var(correction=0))
    if y.ndim > 1:
        return -float(loss_of(output, y))
    return 100 * float((output.argmax(1) == y).float().mean())


def batches(problem: Problem, batch: int, run: Run) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each step its batches; all methods see the same first one."""
    steps = itertools.count()
    for epoch in itertools.count():
        orders = [
            data.epoch_order(
                *(problem.samples, batch),
                **{"seed": run.seed, "epoch": epoch, "stream": stream, "drop_last": True},
            )
            for stream in range(run.batches)
        ]
        for parts, step in zip(zip(*orders, strict=True), steps, strict=False):
            yield [problem.draw(i, data.mix(run.seed, step, k)) for k, i in enumerate(parts)]


class Look:
    """What the steering does, read while training runs."""

    def __init__(self, run: Run, steps: int, perturber: steppe.Perturber) -> None:
        self.steps, self.perturber = steps, perturber
        self.measured: list[float] = []
        self.probes: list[tuple[float, float, float]] = []
        self.highest = 0.0
        self.probed = (steps // 2, steps - 1) if run.seed % 1000 < PROBED else ()
        (self.state,) = perturber.state_dict()["states"]
        self.memory = self.state["steering"][0]

    @property
    def ratio(self) -> float:
        return float(self.memory[-1])

    def after(self, step: int, closure: Callable[[], Tensor]) -> None:
        self.highest = max(self.highest, float(self.memory[BASE]))
        if step > 2 * self.steps / 3 and step % 10 == 0:
            self.measured.append(self.perturber.stats()["measured_rise"])
        if step in self.probed:
            stats, probe = self.perturber.stats(), self.perturber.probe(closure, samples=16)
            self.probes.append((probe.rise, probe.stderr, stats["measured_rise"]))

    def line(self) -> dict[str, Any]:
        stats = self.perturber.stats()
        mean = sum(self.measured) / len(self.measured)
        found: dict[str, Any] = {"measured": mean, "highest": self.highest}
        found |= {"ratio": stats["ratio"], "ramp": stats["ramp"], "probes": self.probes}
        noise = self.perturber.method.passes[-1].perturbation
        if isinstance(noise, AdaptiveGaussian):
            low, high = noise.factor(self.state).quantile(torch.tensor([0.1, 0.9])).tolist()
            found["spread"] = high / low
        return found


def train(run: Run, steps: int | None = None) -> dict[str, Any]:
    """The run's line: what the model is worth as the loop leaves it, and after rounding and pruning."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    begin, setting = time.perf_counter(), SETTINGS[run.setting]
    setting = setting if steps is None else replace(setting, steps=steps)
    problem = setting.make(seed=run.seed)
    model, optimizer = problem.model, problem.optimizer
    shares = EqualShares(optimizer) if run.method == "equal shares" else None
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)
    method = run.build()
    perturber = method and steppe.attach(model, optimizer, method, seed=run.seed)
    look = Look(run, setting.steps, perturber) if method and method.steered else None
    many = torch.arange(min(problem.samples, 400))
    probed = many.split(setting.batch)[:4]  # in training mode BatchNorm depends on a batch's size
    if run.method == "no rest" and perturber is not None:
        perturber._training.rests = False

    def closure() -> Tensor:
        drawn = (problem.draw(i, 0) for i in probed)
        return torch.stack([loss_of(model(x), y) for x, y in drawn]).mean()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drawn = itertools.islice(batches(problem, setting.batch, run), setting.steps)
        for step, parts in enumerate(drawn):
            for x, y in parts:
                (loss_of(model(x), y) / run.batches).backward()
            ratio = look.ratio if look is not None else 0.0
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            if shares is not None:
                shares.after(ratio)
            if look is not None:
                look.after(step, closure)
    if perturber is not None:
        perturber.detach()
    return {
        **asdict(run),
        "score": score(model, *problem.held_out),
        "train": score(model, *problem.draw(many, None)),
        "two_bits": score(changed(problem, Rounding(2)), *problem.held_out),
        "pruned": score(changed(problem, Pruning(0.8)), *problem.held_out),
        **(look.line() if look is not None else {}),
        "warned": sorted({str(w.message)[:60] for w in caught}),
        "steps": setting.steps,
        "seconds": round(time.perf_counter() - begin, 2),
        "torch": torch.__version__,
        "simd": torch.backends.cpu.get_cpu_capability(),
    }


@torch.no_grad()
def changed(problem: Problem, change: Change) -> nn.Module:
    """A copy with changed weights, and BatchNorm statistics of training batches that fit them."""
    model = copy.deepcopy(problem.model)
    params = [model.get_parameter(name) for name in changed_weights(model)]
    for p, value in zip(params, change.weights(params, Draw(0, 0)), strict=True):
        p.copy_(value)
    if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        samples = torch.arange(min(problem.samples, 1024)).split(128)
        steppe.recompute_norm_stats(model, [problem.draw(i, 1) for i in samples])
    return model


def read(path: Path) -> dict[Run, dict[str, Any]]:
    names = [field.name for field in fields(Run)]
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Run(**{name: line[name] for name in names}): line for line in kept}


def found(lines: Lines, run: Run) -> Mapping[str, Any] | None:
    """The run's line. One whose ratio never reached .3 is the same run under either bound."""
    if run in lines:
        return lines[run]
    if run.bound == 0.3:
        other = lines.get(replace(run, bound=0.5))
        if other is not None and other["highest"] < 0.3:
            return other
    return None


def missing(lines: Lines, runs: Iterable[Run]) -> list[Run]:
    """What is still to be trained, baselines included."""
    wanted = dict.fromkeys(run for each in runs for run in (each.baseline, each))
    return [run for run in wanted if found(lines, run) is None]
