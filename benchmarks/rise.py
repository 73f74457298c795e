"""Which rise is safe without tuning? The protocol of docs/decisions.md, *Default strengths*.

    python benchmarks/rise.py [--jobs 2] [--minutes 60]    train what is missing, cheapest first
    python benchmarks/rise.py choose                       what the runs so far choose

Stage 1 picks the ramp and the bound, stage 2 the rise of one-pass and of mixed methods, stage 3 msam's
rho; stage 4 chooses nothing and compares the rise with a ratio, ARWP and no rest steps. Each run is a line of
`benchmarks/results/rise.jsonl`, written when it ends; the same command resumes. What is chosen is a function of
these lines alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rise_runs import Lines, Run, found, missing, read, train
from rise_settings import SETTINGS

from steppe.lab.statistics import mean_std
from studies.pool import side_by_side

LINES = Path(__file__).parent / "results" / "rise.jsonl"
FIRST_SEED = 30_000
RISES = (0.02, 0.05, 0.1, 0.2)
RATIOS = (0.05, 0.1, 0.2, 0.4)
RHOS = (0.05, 0.1, 0.2, 0.4)
COMBINATIONS = tuple(itertools.product((4, 2), (0.5, 0.3)))
"""Power of the ramp and bound of the relative displacement."""
STAGE_1 = [
    name for name in SETTINGS if not name.startswith(("lm", "vit-wrong", "minilm", "cifar10"))
]
STAGE_1_RISES, STAGE_1_SEEDS, STAGE_3_SEEDS = (0.05, 0.2), 3, 5
MEAN, NOTICED, WORST, MOST = -0.1, 0.3, -1.0, 1.0
"""Points: the least mean over settings; the loss on one that counts unless two standard errors are more;
the least on any one; the most that one setting adds to the mean."""
ACTIVE = 4
"""Settings on which a rise has to do something."""


class Gain(NamedTuple):
    """Over the baseline with the same seed, in points."""

    mean: float
    stderr: float
    n: int

    @property
    def loses(self) -> bool:
        noise = 2 * self.stderr if self.n > 1 else math.inf
        return self.mean < WORST or self.mean < -max(NOTICED, noise)


class Verdict(NamedTuple):
    """What the rule says of one method at one strength."""

    gains: dict[str, Gain]
    measured: dict[str, float]
    """Mean rise in the last third of training, as a share of what was asked."""

    @property
    def mean(self) -> float:
        return mean_std([min(gain.mean, MOST) for gain in self.gains.values()])[0]

    @property
    def active(self) -> list[str]:
        """Settings where half of the rise or more is measured."""
        return [name for name, share in self.measured.items() if share >= 0.5]

    @property
    def passes(self) -> bool:
        return self.mean >= MEAN and not any(gain.loses for gain in self.gains.values())


def seeds(setting: str, most: int | None = None) -> range:
    count = SETTINGS[setting].seeds if most is None else min(most, SETTINGS[setting].seeds)
    return range(FIRST_SEED, FIRST_SEED + count)


def stage_1() -> Iterator[Run]:
    for setting, (power, bound), rise in itertools.product(STAGE_1, COMBINATIONS, STAGE_1_RISES):
        for seed in seeds(setting, STAGE_1_SEEDS):
            yield Run(setting, "rwp", rise, power, bound, seed)


def stage_2(lines: Lines, power: int, bound: float) -> Iterator[Run]:
    for method in ("rwp", "m_rwp"):
        yield from largest_first(lines, [Run("", method, rise, power, bound, 0) for rise in RISES])


def stage_3(lines: Lines) -> Iterator[Run]:
    yield from largest_first(
        lines, [Run("", "msam", rho, 0, 0.0, 0) for rho in RHOS], STAGE_3_SEEDS
    )


def stage_4() -> Iterator[Run]:
    """Questions that choose nothing: rise against ratio under the same ramp; ARWP; no rest steps; equal shares."""
    cells = [
        *itertools.product(["rwp"], RISES),
        *itertools.product(["ramped ratio"], RATIOS),
        *itertools.product(["arwp", "no rest", "equal shares"], (0.02, 0.2)),
    ]
    for setting in SETTINGS:
        if setting.startswith(("mlp", "resnet", "vit", "fashion")):
            for seed, cell in itertools.product(seeds(setting, STAGE_1_SEEDS), cells):
                yield Run(setting, *cell, 2, 0.5, seed)


def largest_first(lines: Lines, cells: list[Run], most: int | None = None) -> Iterator[Run]:
    """All runs of the largest strength that may still pass, and those of the larger ones that are there:
    a strength is given up once it loses on a setting with all its seeds, or as a whole."""
    for cell in sorted(cells, key=lambda run: -run.strength):
        runs = [replace(cell, setting=s, seed=seed) for s in SETTINGS for seed in seeds(s, most)]
        verdict = judge(lines, runs)
        lost = {name: gain for name, gain in verdict.gains.items() if gain.loses}
        given_up = any(gain.n == len(seeds(name, most)) for name, gain in lost.items())
        if not given_up and (verdict.passes or missing(lines, runs)):
            yield from sorted(runs, key=lambda run: run.setting not in lost)
            return
        yield from (run for run in runs if found(lines, run) is not None)


def judge(lines: Lines, runs: Iterable[Run]) -> Verdict:
    """The rule on those of the runs that are there with their baselines; without any it does not pass."""
    there = [run for run in runs if not missing(lines, [run])]
    shares: dict[str, list[float]] = {}
    for run in there:
        line = found(lines, run) or {}
        if run.strength and "measured" in line:
            shares.setdefault(run.setting, []).append(line["measured"] / run.strength)
    means = {name: statistics.mean(values) for name, values in shares.items()}
    return Verdict(gains(lines, there), means)


def gains(lines: Lines, runs: Iterable[Run], score: str = "score") -> dict[str, Gain]:
    """By setting what the runs gain over their baselines, as trained or after a change."""
    points: dict[str, list[float]] = {}
    for run in runs:
        line, plain = found(lines, run), found(lines, run.baseline)
        if line is not None and plain is not None:
            gain = SETTINGS[run.setting].points * (line[score] - plain[score])
            points.setdefault(run.setting, []).append(gain if math.isfinite(gain) else -100.0)
    made = {}
    for name, values in points.items():
        mean, std = mean_std(values)
        error = std / math.sqrt(len(values)) if len(values) > 1 else math.nan
        made[name] = Gain(mean, error, len(values))
    return made


def cells(runs: Iterable[Run]) -> dict[Run, list[Run]]:
    """The runs by all that makes them but setting and seed."""
    made: dict[Run, list[Run]] = {}
    for run in runs:
        made.setdefault(replace(run, setting="", seed=0), []).append(run)
    return made


def to_do(lines: Lines) -> list[Run]:
    """The next runs of the first stage that is not complete; CIFAR-10, which takes longest, at the end."""
    stages = (stage_1(), stage_2(lines, *combination(lines)), stage_3(lines), stage_4())
    first, *choosing, last = (missing(lines, stage) for stage in stages)
    short = [[run for run in runs if run.setting != "cifar10"] for runs in choosing]
    return next((runs for runs in (first, *short, *choosing, last) if runs), [])


def combination(lines: Lines) -> tuple[int, float]:
    """Stage 1: where a rise that passes and does something gives the most, by the mean share times the
    rise asked."""
    best, chosen = -1.0, COMBINATIONS[0]
    for cell, runs in cells(stage_1()).items():
        verdict = judge(lines, runs)
        if verdict.passes and len(verdict.active) >= ACTIVE:
            given = cell.strength * statistics.mean(min(1.0, m) for m in verdict.measured.values())
            if given > best:
                best, chosen = given, (cell.power, cell.bound)
    return chosen


def largest(lines: Lines, runs: Iterable[Run]) -> dict[str, float]:
    """For each method the largest strength that passes, where one does."""
    by_method: dict[str, float] = {}
    for cell, mine in cells(runs).items():
        if judge(lines, mine).passes:
            by_method[cell.method] = max(cell.strength, by_method.get(cell.method, 0.0))
    return by_method


def compressed(lines: Lines, runs: list[Run]) -> dict[str, Gain]:
    """What is gained significantly after rounding or pruning."""
    changes = {change: gains(lines, runs, change) for change in ("two_bits", "pruned")}
    every = {f"{name} {change}": g for change, made in changes.items() for name, g in made.items()}
    return {name: gain for name, gain in every.items() if gain.mean > 2 * gain.stderr}


def agreement(lines: Lines) -> dict[str, tuple[float, float, int]]:
    """By setting: a direct measurement at the end of training over half the meter, at the median of all
    runs, the share of them within [.5, 2], and how many they are."""
    ratios: dict[str, list[float]] = {}
    for run, line in lines.items():
        for rise, _, measured in line.get("probes", [])[-1:]:
            if measured > 0:
                ratios.setdefault(run.setting, []).append(rise / measured)
    return {
        name: (statistics.median(r), sum(0.5 <= x <= 2 for x in r) / len(r), len(r))
        for name, r in ratios.items()
    }


def spreads(lines: Lines) -> dict[str, tuple[float, int]]:
    """By setting, the 90 % quantile of ARWP's factor over its 10 % quantile at the end, the median over
    runs, and how many they are. Lines of before it was recorded have none."""
    found: dict[str, list[float]] = {}
    for run, line in lines.items():
        if "spread" in line:
            found.setdefault(f"{run.setting}, {run.strength:g}", []).append(line["spread"])
    return {name: (statistics.median(each), len(each)) for name, each in found.items()}


def show(title: str, verdict: Verdict) -> None:
    if verdict.gains:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in verdict.measured.items())
        print(f"{title}: mean {verdict.mean:+.2f}, {'passes' if verdict.passes else 'fails'}")
        print("   ", listed(verdict.gains))
        print("    measured / asked:", shares or "not measured")


def listed(gains: Mapping[str, Gain]) -> str:
    return "; ".join(
        f"{name} {gain.mean:+.2f} ± {gain.stderr:.2f} ({gain.n})" + " loses" * gain.loses
        for name, gain in gains.items()
    )


def choose(lines: Lines) -> None:
    power, bound = combination(lines)
    stages = (stage_1(), stage_2(lines, power, bound), stage_3(lines), stage_4())
    for number, stage in enumerate(stages, 1):
        runs = list(stage)
        by_cell = cells(runs)
        for cell, mine in by_cell.items():
            title = f"stage {number}: {cell.method} {cell.strength}"
            show(f"{title}, power {cell.power}, bound {cell.bound}", judge(lines, mine))
        left = len(missing(lines, runs))
        so_far = f"(so far: {left} runs are missing)" * bool(left)
        if number == 1:
            print(f"chosen: power {power}, bound {bound}", so_far)
        elif number == 4:
            worst_losses(lines, by_cell)
        else:
            chosen = largest(lines, runs)
            for cell, mine in by_cell.items():
                if chosen.get(cell.method) == cell.strength:
                    active = judge(lines, mine).active
                    print(f"chosen: {cell.method} {cell.strength}", so_far)
                    print(f"    half of the rise or more on: {', '.join(active) or 'none'}")
                    print("    gains after a change:", listed(compressed(lines, mine)))
    for name, (median, within, n) in agreement(lines).items():
        print(f"probe / (meter / 2), {name}: {median:.2f}, {within:.0%} within [.5, 2] (n = {n})")
    for name, (median, n) in spreads(lines).items():
        print(f"90 / 10 % quantile of ARWP's factor, {name}: {median:.2f} (n = {n})")


def worst_losses(lines: Lines, by_cell: Mapping[Run, list[Run]]) -> None:
    """For each kind of strength what its best value loses on its worst setting."""
    worst: dict[str, tuple[float, float, str]] = {}
    for cell, runs in by_cell.items():
        if made := gains(lines, runs):
            gain, name = min((gain.mean, name) for name, gain in made.items())
            before = worst.get(cell.method, (-math.inf, 0.0, ""))
            worst[cell.method] = max(before, (gain, cell.strength, name))
    for method, (gain, strength, name) in worst.items():
        print(f"    {method}: {strength} loses at most {-gain:.2f} ({name})")


def work(path: Path, jobs: int, minutes: float) -> None:
    """Keep `jobs` processes busy with what is missing until time is up."""
    lines, end = read(path), time.monotonic() + 60 * minutes

    def next_runs() -> list[Run]:
        return to_do(lines) if time.monotonic() < end else []

    for run, line in side_by_side(jobs, next_runs, train):
        lines[run] = line
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(run, f"{line['score']:.2f}, {line['seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", nargs="?", choices=("train", "choose"), default="train")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread")
    parser.add_argument("--minutes", type=float, default=60, help="no run begins after these")
    parser.add_argument("--lines", type=Path, default=LINES, help="where the runs are kept")
    arguments = parser.parse_args()
    if arguments.task == "choose":
        choose(read(arguments.lines))
    else:
        work(arguments.lines, arguments.jobs, arguments.minutes)


if __name__ == "__main__":
    main()
