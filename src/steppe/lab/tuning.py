"""Tuning: each method's strength, chosen on a validation split of the training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from steppe.lab.config import Config
from steppe.lab.errors import LabError
from steppe.lab.specs import Spec, option_names
from steppe.lab.statistics import mean_std

if TYPE_CHECKING:
    from steppe.lab.engines import Job
    from steppe.lab.results import Result

    Run = Callable[[Sequence[Job], str], list[Result]]
    """From trials and a title for them to their results, in order."""

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
RISES = (0.02, 0.05, 0.1, 0.2, 0.4)
FIRST_SEED = 10_000
"""Tuning seeds begin here, apart from those that are reported."""


@dataclass(frozen=True)
class Tune:
    """How strengths are chosen, on a validation split: the best mean, the smaller in a tie."""

    rises: tuple[float, ...] = RISES
    """The grid of methods without a given strength, or with a rise: loss rises, the same everywhere."""
    factors: tuple[float, ...] = FACTORS
    """The grid of the others: multiples of a fixed strength."""
    seeds: int = 3
    """Runs per value, with seeds that are not reported."""
    validation: float = 0.2
    """The fraction of the training data held out to choose by (with its noisy labels)."""
    extend: bool = True
    """If the best multiple is at the edge of the grid, try two more beyond it, once."""
    baseline: bool = False
    """Also tune the baseline's weight decay."""
    keep: bool = True
    """Keep what the method has without tuning, unless another value is better by more than the standard
    error of the paired difference over the seeds."""

    def __post_init__(self) -> None:
        for name, grid in (("factors", self.factors), ("rises", self.rises)):
            if not grid or min(grid) <= 0:
                raise LabError(f"tuning needs {name} above 0, at least one; got {grid}.")
        if self.seeds < 1 + self.keep:
            raise LabError(
                f"tuning needs {1 + self.keep} or more seeds per value, got {self.seeds}."
                + " One seed has no standard error; with keep off the best mean wins." * self.keep
            )
        if not 0 < self.validation < 1:
            raise LabError(f"tuning's validation must be between 0 and 1, got {self.validation}.")


@dataclass(frozen=True)
class Choice:
    """A method with the strength it will run with, and the scores that led to it."""

    spec: Spec
    scores: Mapping[float, float] = field(default_factory=dict)
    """Mean validation metric by strength."""
    trials: int = 0
    kept: bool = False
    """Whether no value was better than what the method has without tuning."""

    @property
    def how(self) -> str:
        """`best of 5 (15 trials)`, `kept`, `given` or `default`; empty for the baseline."""
        if self.scores:
            words = "kept, none better" if self.kept else "best"
            return f"{words} of {len(self.scores)} ({self.trials} trials)"
        if self.spec.strength is not None:
            return "given"
        return "default" if self.spec.full_strength else ""


@dataclass
class _Search:
    """What is turned for one spec, and its trials by value. `usual`: without tuning (None: as it is)."""

    spec: Spec
    knob: str
    grid: tuple[float, ...]
    usual: float | None
    extends: bool
    found: dict[float | None, list[Result]] = field(default_factory=dict)

    @property
    def scores(self) -> dict[float, float]:
        return {value: score(runs) for value, runs in self.found.items() if value is not None}

    def values(self, keep: bool) -> Sequence[float | None]:
        """The values to try: the grid, and after it what lies beyond its edge."""
        if self.found:
            return _beyond(self.scores) if self.extends else ()
        return self.grid if self.usual in self.grid or not keep else (*self.grid, self.usual)

    def trial(self, value: float | None) -> Spec:
        if value is None:
            return self.spec
        if self.knob == "weight_decay":
            return replace(self.spec, fields={**self.spec.fields, self.knob: value})
        return self.spec.with_options(**{self.knob: value})

    def choice(self, keep: bool) -> Choice:
        scores, found = self.scores, self.found
        if keep:
            usual = found[self.usual]
            scores = {
                v: s for v, s in scores.items() if v != self.usual and better(found[v], usual)
            }
        value = _best(scores) if scores else self.usual
        trials = sum(map(len, found.values()))
        return Choice(self.trial(value), self.scores, trials, kept=not scores)


def tune_all(specs: Sequence[Spec], config: Config, how: Tune, run: Run) -> list[Choice]:
    """The choice for each spec; test data plays no part. `run` gives the results of trials."""
    from steppe.lab.engines import Job

    config = config.replace(
        validation=how.validation, eval_every=0, track_train=False, recompute_norm=False
    )
    searches = [_search(spec, config, how) for spec in specs]
    for title in ("tuning", "tuning, edges")[: 1 + how.extend]:
        jobs, places = [], []
        for search in filter(None, searches):
            for value in search.values(how.keep):
                words = "as it is" if value is None else f"{search.knob} {value:g}"
                for seed in range(FIRST_SEED, FIRST_SEED + how.seeds):
                    trial = search.trial(value).apply(config.replace(seed=seed))
                    jobs.append(Job(f"{search.spec.name} {words} seed {seed}", trial))
                    places.append((search, value))
        for (search, value), result in zip(places, run(jobs, title), strict=True):
            search.found.setdefault(value, []).append(result)
    pairs = zip(specs, searches, strict=True)
    return [search.choice(how.keep) if search else Choice(spec) for spec, search in pairs]


def _search(spec: Spec, config: Config, how: Tune) -> _Search | None:
    """A rise where the method has one and no fixed strength is given; else multiples of what it has."""
    knob = spec.full_strength
    if "rise" in option_names(spec.name) and (not spec.strength or spec.strength[0] == "rise"):
        usual = knob[1] if knob and knob[0] == "rise" else None
        return _Search(spec, "rise", how.rises, usual, extends=False)
    if knob is None or knob[1] <= 0:
        decay = float(spec.fields.get("weight_decay", config.weight_decay))
        if not how.baseline or decay <= 0:
            return None
        knob = "weight_decay", decay
    grid = tuple(knob[1] if f == 1 else _round(knob[1] * f) for f in how.factors)
    return _Search(spec, knob[0], grid, knob[1], extends=True)


def better(new: Sequence[Result], old: Sequence[Result]) -> bool:
    """Whether the validation metric gains more than the standard error of the paired difference."""
    if any(run.status == "diverged" for run in (*new, *old)):
        return all(run.status != "diverged" for run in new)
    sign = 1 if new[0].higher_is_better else -1
    pairs = zip(new, old, strict=True)
    gains = [sign * (a.score("validation") - b.score("validation")) for a, b in pairs]
    mean, std = mean_std(gains)
    return len(gains) > 1 and mean > std / math.sqrt(len(gains))


def score(runs: Sequence[Result], split: str = "validation") -> float:
    """The mean metric, negated where lower is better; a run that diverged makes it the worst."""
    if any(run.status == "diverged" for run in runs):
        return -math.inf
    mean = math.fsum(run.score(split) for run in runs) / len(runs)
    return mean if runs[0].higher_is_better else -mean


def _best(scores: Mapping[float, float]) -> float:
    return max(sorted(scores), key=lambda value: scores[value])


def _beyond(scores: Mapping[float, float]) -> tuple[float, ...]:
    """Two more values where the best is the smallest or the largest tried."""
    values = sorted(scores)
    if len(values) < 2:
        return ()
    best, ratio = _best(scores), values[1] / values[0]
    power = {values[0]: -1, values[-1]: 1}.get(best, 0)
    return (_round(best * ratio**power), _round(best * ratio ** (2 * power))) if power else ()


def _round(value: float) -> float:
    """Three digits, so that a grid reads well and a run is found again."""
    return float(f"{value:.3g}")
