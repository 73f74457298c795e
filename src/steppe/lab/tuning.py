"""Tuning: each method's strength, chosen on a validation split of the training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from steppe.lab.config import Config
from steppe.lab.errors import LabError
from steppe.lab.specs import Spec

if TYPE_CHECKING:
    from torch import nn

    from steppe.lab.jobs import Job
    from steppe.lab.problems import Sources
    from steppe.lab.results import Result

    Run = Callable[[Sequence[Job], str], list[Result]]
    """From trials and a title for them to their results, in order."""

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
FIRST_SEED = 10_000
"""Tuning seeds begin here, apart from those that are reported."""


@dataclass(frozen=True)
class Tune:
    """How strengths are chosen: by the best mean on a validation split, the smaller in a tie."""

    factors: tuple[float, ...] = FACTORS
    """The grid: multiples of each method's own strength."""
    seeds: int = 2
    """Runs per value, with seeds that are not reported."""
    validation: float = 0.2
    """The fraction of the training data held out to choose by (with its noisy labels)."""
    extend: bool = True
    """If the best value is at the edge of the grid, try two more beyond it, once."""
    baseline: bool = False
    """Also tune the baseline's weight decay."""

    def __post_init__(self) -> None:
        if not self.factors or min(self.factors) <= 0:
            raise LabError(f"tuning needs factors above 0, at least one; got {self.factors}.")
        if self.seeds < 1:
            raise LabError(f"tuning needs at least one seed per value, got {self.seeds}.")
        if not 0 < self.validation < 1:
            raise LabError(f"tuning's validation must be between 0 and 1, got {self.validation}.")


@dataclass(frozen=True)
class Choice:
    """A method with the strength it will run with, and the scores that led to it."""

    spec: Spec
    scores: Mapping[float, float] = field(default_factory=dict)
    """Mean validation metric by strength."""
    trials: int = 0

    @property
    def how(self) -> str:
        """`best of 5 (10 trials)`, `given` or `default`; empty for the baseline."""
        if self.scores:
            return f"best of {len(self.scores)} ({self.trials} trials)"
        if self.spec.strength is not None:
            return "given"
        return "default" if self.spec.strength_for(None) else ""


def tune_all(
    specs: Sequence[Spec], config: Config, how: Tune, run: Run, sources: Sources | None = None
) -> list[Choice]:
    """The choice for each spec; test data plays no part. `run` gives the results of trials."""
    config = config.replace(
        validation=how.validation, eval_every=0, track_train=False, recompute_norm=False
    )
    from steppe.lab.jobs import Job

    model = None
    if any(spec.strength is None and spec.strength_for(None) for spec in specs):
        model = _new_model(config, sources)
    knobs = [_knob(spec, spec.strength_for(model), config, how) for spec in specs]
    grids: list[tuple[float, ...]] = [
        () if knob is None else tuple(_round(knob[1] * factor) for factor in how.factors)
        for knob in knobs
    ]
    scores: list[dict[float, float]] = [{} for _ in specs]
    for round_number in range(2 if how.extend else 1):
        jobs, places = [], []
        for i, (spec, knob) in enumerate(zip(specs, knobs, strict=True)):
            for value in grids[i]:
                assert knob is not None  # no knob, no grid
                for seed in range(FIRST_SEED, FIRST_SEED + how.seeds):
                    trial = _with_knob(spec, knob[0], value).apply(config.replace(seed=seed))
                    jobs.append(Job(f"{spec.name} {knob[0]} {value:g} seed {seed}", trial))
                    places.append((i, value))
        results = run(jobs, "tuning" if round_number == 0 else "tuning, edges")
        for i, value in dict.fromkeys(places):
            runs = [r for place, r in zip(places, results, strict=True) if place == (i, value)]
            scores[i][value] = _score(runs)
        grids = [_beyond(found) for found in scores]
    return [
        _choice(spec, knob[0], found, how) if knob else Choice(spec)
        for spec, knob, found in zip(specs, knobs, scores, strict=True)
    ]


def _new_model(config: Config, sources: Sources | None) -> nn.Module:
    import torch

    from steppe.lab.problems import Sources, load_problem

    with torch.random.fork_rng(devices=[]):
        return load_problem(config, sources or Sources()).model


def _knob(
    spec: Spec, strength: tuple[str, float] | None, config: Config, how: Tune
) -> tuple[str, float] | None:
    """What is turned, and its middle value; None where nothing is."""
    if strength is not None and strength[1] > 0:
        return strength
    decay = float(spec.fields.get("weight_decay", config.weight_decay))
    return ("weight_decay", decay) if how.baseline and decay > 0 else None


def _with_knob(spec: Spec, knob: str, value: float) -> Spec:
    if knob == "weight_decay":
        return Spec(spec.name, spec.options, {**spec.fields, knob: value})
    return spec.with_options(**{knob: value})


def _score(runs: Sequence[Result]) -> float:
    """Higher is better; a run that diverged makes its value the worst."""
    if any(run.status == "diverged" for run in runs):
        return -math.inf
    mean = math.fsum(run.score("validation") for run in runs) / len(runs)
    return mean if runs[0].higher_is_better else -mean


def _best(scores: Mapping[float, float]) -> float:
    return max(sorted(scores), key=lambda value: scores[value])


def _beyond(scores: Mapping[float, float]) -> tuple[float, ...]:
    """Two more values where the best is the smallest or the largest tried."""
    values = sorted(scores)
    if len(values) < 2:
        return ()
    ratio = values[1] / values[0]
    best = _best(scores)
    if best == values[-1]:
        return _round(best * ratio), _round(best * ratio**2)
    if best == values[0]:
        return _round(best / ratio), _round(best / ratio**2)
    return ()


def _choice(spec: Spec, knob: str, scores: dict[float, float], how: Tune) -> Choice:
    return Choice(_with_knob(spec, knob, _best(scores)), scores, len(scores) * how.seeds)


def _round(value: float) -> float:
    """Three digits, so that a grid reads well and a run is found again."""
    return float(f"{value:.3g}")
