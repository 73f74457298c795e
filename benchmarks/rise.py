"""Which rise is safe without tuning? The protocol of docs/decisions.md, *Default strengths*.

    python benchmarks/rise.py [--jobs 2] [--minutes 60]    train what is missing, cheapest first
    python benchmarks/rise.py choose                       what the runs so far choose

Stage 1 picks the ramp and the bound, stage 2 the rise of one-pass and of mixed methods, stage 3 msam's
rho; stage 4 chooses nothing and compares the rise with a ratio, ARWP and no rest steps. Each run is a line of `benchmarks/results/rise.jsonl`, written when it ends; the same command takes
up where it was stopped. What is chosen is a function of these lines alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from rise_settings import SETTINGS, Run, train

LINES = Path(__file__).parent / "results" / "rise.jsonl"
FIRST_SEED = 30_000
RISES = (0.02, 0.05, 0.1, 0.2)
RATIOS = (0.05, 0.1, 0.2, 0.4)
RHOS = (0.05, 0.1, 0.2, 0.4)
COMBINATIONS = tuple(itertools.product((4, 2), (0.5, 0.3)))
"""Power of the ramp and bound of the relative displacement."""
STAGE_1 = (
    "regression",
    "mlp-clean",
    "mlp-wrong",
    "resnet-clean",
    "resnet-wrong",
    "vit-clean",
    "fashion",
)
STAGE_1_RISES, STAGE_1_SEEDS, STAGE_3_SEEDS = (0.05, 0.2), 3, 5
MEAN, NOTICED, WORST, MOST = -0.1, 0.3, -1.0, 1.0
"""Points: the least mean over settings; the loss on one that counts unless two standard errors are more;
the least on any one; the most that one setting adds to the mean."""
ACTIVE = 4
"""Settings on which a rise has to do something."""
Lines = Mapping[Run, Mapping[str, Any]]


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
        return statistics.mean(min(gain.mean, MOST) for gain in self.gains.values())

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
    """Questions that choose nothing: rise against ratio under the same ramp; ARWP; no rest steps."""
    for setting in SETTINGS:
        if setting.startswith(("mlp", "resnet", "vit", "fashion")):
            for seed in seeds(setting, STAGE_1_SEEDS):
                cells = [
                    *itertools.product(["rwp"], RISES),
                    *itertools.product(["ramped ratio"], RATIOS),
                ]
                cells += itertools.product(["arwp", "no rest"], (0.02, 0.2))
                yield from (Run(setting, *cell, 2, 0.5, seed) for cell in cells)


def largest_first(lines: Lines, cells: list[Run], most: int | None = None) -> Iterator[Run]:
    """All runs of the largest strength that may still pass, and those of the larger ones that are there:
    a strength is given up once it loses on a setting with all its seeds, or as a whole."""
    for cell in sorted(cells, key=lambda run: -run.strength):
        runs = [replace(cell, setting=s, seed=seed) for s in SETTINGS for seed in seeds(s, most)]
        verdict = judge(lines, runs)
        lost = {} if verdict is None else {n: g for n, g in verdict.gains.items() if g.loses}
        if not any(gain.n == len(seeds(name, most)) for name, gain in lost.items()) and (
            not complete(lines, runs) or (verdict is not None and verdict.passes)
        ):
            yield from sorted(runs, key=lambda run: run.setting not in lost)
            return
        yield from (run for run in runs if found(lines, run) is not None)


def found(lines: Lines, run: Run) -> Mapping[str, Any] | None:
    """The run's line. One whose ratio never reached .3 is the same run under either bound."""
    if run in lines:
        return lines[run]
    if run.bound == 0.3:
        other = lines.get(replace(run, bound=0.5))
        if other is not None and other["highest"] < 0.3:
            return other
    return None


def judge(lines: Lines, runs: Iterable[Run]) -> Verdict | None:
    """The rule on those of the runs that are there with their baselines; None without any."""
    gains: dict[str, list[float]] = {}
    measured: dict[str, list[float]] = {}
    for run in runs:
        line, plain = found(lines, run), found(lines, run.baseline)
        if line is None or plain is None:
            continue
        points = SETTINGS[run.setting].points * (line["score"] - plain["score"])
        gains.setdefault(run.setting, []).append(points if math.isfinite(points) else -100.0)
        if run.strength and "measured" in line:
            measured.setdefault(run.setting, []).append(line["measured"] / run.strength)
    if not gains:
        return None
    means = {name: statistics.mean(values) for name, values in measured.items()}
    return Verdict({name: gain_of(values) for name, values in gains.items()}, means)


def gain_of(values: list[float]) -> Gain:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Gain(statistics.mean(values), error, len(values))


def complete(lines: Lines, runs: Iterable[Run]) -> bool:
    return not missing(lines, runs)


def missing(lines: Lines, runs: Iterable[Run]) -> list[Run]:
    """What is still to be trained, baselines included."""
    wanted = dict.fromkeys(run for each in runs for run in (each.baseline, each))
    return [run for run in wanted if found(lines, run) is None]


def to_do(lines: Lines) -> list[Run]:
    """The next runs of the first stage that is not complete."""
    left = missing(
        lines, sorted(stage_1(), key=lambda run: (SETTINGS[run.setting].seconds, -run.bound))
    )
    if not left:
        left = missing(lines, stage_2(lines, *combination(lines)))
        left.sort(key=lambda run: SETTINGS[run.setting].seconds > 30)  # CIFAR-10 last
    return left or missing(lines, stage_3(lines)) or missing(lines, stage_4())


def combination(lines: Lines) -> tuple[int, float]:
    """Stage 1: where a rise that passes and does something gives the most, by the mean share times the
    rise asked."""
    best, chosen = -1.0, COMBINATIONS[0]
    for combo, rise in itertools.product(COMBINATIONS, STAGE_1_RISES):
        runs = [r for r in stage_1() if (r.power, r.bound) == combo and r.strength == rise]
        verdict = judge(lines, runs)
        if verdict is not None and verdict.passes and len(verdict.active) >= ACTIVE:
            given = rise * statistics.mean(min(1.0, m) for m in verdict.measured.values())
            if given > best:
                best, chosen = given, combo
    return chosen


def largest(lines: Lines, runs: Iterable[Run]) -> dict[str, float]:
    """For each method the largest strength that passes, where one does."""
    by_method: dict[str, float] = {}
    cells: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.method, run.strength), []).append(run)
    for (method, strength), cell in cells.items():
        verdict = judge(lines, cell)
        if verdict is not None and verdict.passes:
            by_method[method] = max(strength, by_method.get(method, 0.0))
    return by_method


def does_something(lines: Lines, runs: list[Run]) -> tuple[list[str], dict[str, Gain]]:
    """Settings where half of the rise is measured, and those that gain after rounding or pruning."""
    verdict = judge(lines, runs)
    active = verdict.active if verdict else []
    gains: dict[str, Gain] = {}
    for name, change in itertools.product(SETTINGS, ("two_bits", "pruned")):
        pairs = [(found(lines, r), found(lines, r.baseline)) for r in runs if r.setting == name]
        values = [a[change] - b[change] for a, b in pairs if a is not None and b is not None]
        if len(values) > 1:
            gain = gain_of([SETTINGS[name].points * value for value in values])
            if gain.mean > 2 * gain.stderr:
                gains[f"{name} {change}"] = gain
    return active, gains


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


def read(path: Path) -> dict[Run, dict[str, Any]]:
    names = [field.name for field in fields(Run)]
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Run(**{name: line[name] for name in names}): line for line in kept}


def show(title: str, verdict: Verdict | None) -> None:
    if verdict is None:
        return
    cells = [f"{name} {g.mean:+.2f} ± {g.stderr:.2f} ({g.n})" + " loses" * g.loses
             for name, g in verdict.gains.items()]  # fmt: skip
    shares = ", ".join(f"{name} {share:.2f}" for name, share in verdict.measured.items())
    print(f"{title}: mean {verdict.mean:+.2f}, {'passes' if verdict.passes else 'fails'}")
    print("   ", "; ".join(cells))
    if shares:
        print("    measured / asked:", shares)


def choose(lines: Lines) -> None:
    power, bound = combination(lines)
    for (p, b), rise in itertools.product(COMBINATIONS, STAGE_1_RISES):
        runs = [r for r in stage_1() if (r.power, r.bound, r.strength) == (p, b, rise)]
        show(f"stage 1: power {p}, bound {b}, rise {rise}", judge(lines, runs))
    print(f"chosen: power {power}, bound {bound}", "" if complete(lines, stage_1()) else "(so far)")
    for stage, runs in ((2, list(stage_2(lines, power, bound))), (3, list(stage_3(lines)))):
        cells = sorted({(r.method, r.strength) for r in runs})
        for method, strength in cells:
            mine = [r for r in runs if (r.method, r.strength) == (method, strength)]
            show(f"stage {stage}: {method} {strength}", judge(lines, mine))
        left = len(missing(lines, runs))
        for method, strength in largest(lines, runs).items():
            print(f"chosen: {method} {strength}", f"(so far: {left} runs are missing)" * bool(left))
            mine = [r for r in runs if (r.method, r.strength) == (method, strength)]
            active, gains = does_something(lines, mine)
            print(f"    half of the rise or more on: {', '.join(active) or 'none'}")
            print(
                "    gains:",
                ", ".join(f"{k} {g.mean:+.1f} ± {g.stderr:.1f}" for k, g in gains.items()),
            )

    print(
        "stage 4: three seeds of each setting, and what the best value of each kind loses at worst"
    )
    cells = {(r.method, r.strength): r for r in stage_4()}
    worst: dict[str, tuple[float, float, str]] = {}
    for method, strength in cells:
        verdict = judge(
            lines, [r for r in stage_4() if (r.method, r.strength) == (method, strength)]
        )
        show(f"stage 4: {method} {strength}", verdict)
        if verdict is not None:
            gain, name = min((gain.mean, name) for name, gain in verdict.gains.items())
            worst[method] = max(worst.get(method, (-math.inf, 0.0, "")), (gain, strength, name))
    for method, (gain, strength, name) in worst.items():
        print(f"    {method}: {strength} loses at most {-gain:.2f} ({name})")
    for name, (median, within, n) in agreement(lines).items():
        print(f"probe / (meter / 2), {name}: {median:.2f}, {within:.0%} within [.5, 2] (n = {n})")


def work(path: Path, jobs: int, minutes: float) -> None:
    """Keep `jobs` processes busy with what is missing until time is up."""
    lines, end = read(path), time.monotonic() + 60 * minutes
    running: dict[Future[dict[str, Any]], Run] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        while True:
            if time.monotonic() < end:
                free = [run for run in to_do(lines) if run not in running.values()]
                for run in free[: jobs - len(running)]:
                    running[pool.submit(train, run)] = run
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                run, line = running.pop(done), done.result()
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
