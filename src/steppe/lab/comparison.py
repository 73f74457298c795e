"""`compare`: methods × seeds, paired, with statistics, cost and a plain sentence."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from steppe.lab.compression import with_compression
from steppe.lab.config import Config
from steppe.lab.data import Data
from steppe.lab.engines import Engine, chosen
from steppe.lab.errors import LabError
from steppe.lab.jobs import Job, run_all
from steppe.lab.problems import ModelFn, Sources
from steppe.lab.ranks import world
from steppe.lab.results import Result
from steppe.lab.runs import DEFAULT_STORE
from steppe.lab.sentences import comparison_numbers, comparison_sentence, comparison_table
from steppe.lab.specs import PAPER, Spec, label, parse
from steppe.lab.statistics import Difference, compare_all, mean_std
from steppe.lab.survival import survival_columns, survival_sentence, survival_table
from steppe.lab.tables import Format, Table
from steppe.lab.tasks import Task
from steppe.lab.tuning import Choice, Tune, tune_all


@dataclass(frozen=True)
class Row:
    """One method over all seeds."""

    spec: str
    label: str
    chosen: str
    """How its strength was chosen: given, default, or tuned."""
    results: tuple[Result, ...]
    trials: int = 0
    """Runs spent on choosing the strength."""
    difference: Difference | None = None
    """To the baseline, paired by seed; None for the baseline itself."""
    cost: dict[str, float] = field(default_factory=dict)
    """`time` and `flops` as multiples of the baseline's."""

    @property
    def finished(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.status == "finished")

    @property
    def strength(self) -> str:
        """`ratio 0.6`; empty for plain training."""
        used = next((result.strength for result in self.results if result.strength), None)
        return f"{used[0]} {used[1]:g}" if used else ""

    def values(self, split: str, metric: str) -> list[float]:
        """A metric of all finished seeds."""
        return [result.metrics[split][metric] for result in self.finished]

    def gaps(self) -> list[float]:
        """By how much the training data flatters the deciding metric, per seed."""
        found = []
        for result in self.finished:
            gap = result.score("train") - result.score("test")
            found.append(gap if result.higher_is_better else -gap)
        return found


@dataclass(frozen=True)
class Comparison:
    """Rows of a comparison: the baseline first, then the methods in the order asked for."""

    config: Config
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def baseline(self) -> Row:
        return self.rows[0]

    @cached_property
    def example(self) -> Result:
        """A finished run, for what all runs share."""
        for row in self.rows:
            if row.finished:
                return row.finished[0]
        raise LabError(f"every run diverged: {self.rows[0].results[0].message}")

    def paired(self, spec: str, other: str, split: str = "test") -> list[float]:
        """Differences in the deciding metric, `spec` minus `other`, on the seeds both finished."""
        first, second = self.row(spec), self.row(other)
        pairs = zip(first.results, second.results, strict=True)
        return [
            a.score(split) - b.score(split) for a, b in pairs if a.status == b.status == "finished"
        ]

    def row(self, name: str) -> Row:
        """A row by its spec, its label, or its method's name."""
        for row in self.rows:
            if name in (row.spec, row.label, row.spec.partition(":")[0]):
                return row
        known = ", ".join(row.label for row in self.rows)
        raise LabError(f"this comparison has no method {name!r}, only {known}.")

    def table(self, form: Format = "text") -> str:
        """The table as text or Markdown; as CSV, with plain numbers."""
        if form == "csv":
            return comparison_numbers(self, *survival_columns(self)).csv()
        return "\n\n".join(table.render(form) for table in self._tables())

    def sentence(self) -> str:
        """Which methods differ from the baseline, and which do not, in plain words."""
        return " ".join(filter(None, [comparison_sentence(self), survival_sentence(self)]))

    def _tables(self) -> list[Table]:
        compressed = survival_table(self)
        return [comparison_table(self), *([] if compressed is None else [compressed])]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        metric, split = self.example.metric, "test"
        rows = []
        for row in self.rows:
            mean, std = mean_std(row.values(split, metric))
            rows.append(
                {
                    "spec": row.spec,
                    "label": row.label,
                    "strength": row.strength,
                    "chosen": row.chosen,
                    "trials": row.trials,
                    "n": len(row.finished),
                    "diverged": len(row.results) - len(row.finished),
                    "mean": mean,
                    "std": std,
                    "difference": None if row.difference is None else asdict(row.difference),
                    "cost": row.cost,
                    "runs": [result.to_dict() for result in row.results],
                }
            )
        return {
            "config": self.config.to_dict(),
            "seeds": list(self.seeds),
            "metric": metric,
            "higher_is_better": self.example.higher_is_better,
            "sentence": self.sentence(),
            "environment": self.example.environment,
            "rows": rows,
        }

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables())


def compare(
    model: ModelFn | str | None = None,
    data: Data | Callable[[int], Data] | str | None = None,
    methods: Sequence[str | Spec] = PAPER,
    seeds: int | Sequence[int] = 3,
    *,
    config: Config | None = None,
    task: Task | str | None = None,
    tune: Tune | bool = False,
    store: str | Path | None = DEFAULT_STORE,
    jobs: int | None = None,
    engine: Engine | Literal["local", "ray"] = "local",
    robustness: bool = True,
    progress: bool | None = None,
) -> Comparison:
    """Train all methods on all seeds, each seed from the same weights and data order, and compare.

    `model` is a function that makes the model, `data` a `Data`; names do as well, and `config`
    says the rest (epochs, batch, lr …). `methods` are texts such as "arwp:ratio=.6". The first
    plain "sgd" is the baseline; without one, the first method. Finished runs in `store` are
    taken as they are.

    Each run has `config.threads` threads (default 1). With `jobs=N`, N runs go side by side in
    processes that share torch's threads where the config has no number. `engine="ray"`, or a
    `steppe.lab.ray_engine.Ray` with options, trains them on a Ray cluster.

    With `robustness` (and a `store`, which keeps the models) every model is also measured after
    rounding to 4 and 3 bits and after pruning of 50 and 80 % of its weights.
    """
    place = chosen(engine, jobs)
    config = _with_names(config or Config(), model, data, task, place.threads)
    sources = Sources(
        model=None if model is None or isinstance(model, str) else model,
        data=None if data is None or isinstance(data, str) else data,
        task=task if isinstance(task, Task) else None,
    )

    def run(work: Sequence[Job], title: str) -> list[Result]:
        return run_all(work, sources, store, engine=place, progress=progress, title=title)

    specs = _baseline_first([parse(m) if isinstance(m, str) else m for m in methods])
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not numbers:
        raise LabError("a comparison needs at least one seed.")
    with place.open() if tune else nullcontext():  # one cluster for both
        choices = [Choice(spec) for spec in specs]
        if tune:
            how = tune if isinstance(tune, Tune) else Tune()
            choices = tune_all(specs, config, how, run, sources)
        work = [
            Job(f"{choice.spec} seed {seed}", choice.spec.apply(config.replace(seed=seed)))
            for seed in numbers
            for choice in choices
        ]
        results = run(work, "comparison")
    if robustness:
        quiet = progress is False
        results = world().from_first(lambda: with_compression(results, sources, quiet=quiet))
    rows = [
        Row(
            spec=str(choice.spec),
            label=label(choice.spec, config.optimizer),
            chosen=choice.how,
            trials=choice.trials,
            results=tuple(results[i :: len(choices)]),
        )
        for i, choice in enumerate(choices)
    ]
    return Comparison(config, numbers, judged(rows))


def _with_names(
    config: Config,
    model: ModelFn | str | None,
    data: Data | Callable[[int], Data] | str | None,
    task: Task | str | None,
    threads: int,
) -> Config:
    named = {"model": model, "data": data, "task": task}
    changes: dict[str, Any] = {k: v for k, v in named.items() if isinstance(v, str)}
    return config.replace(threads=config.threads or threads, **changes)


def _baseline_first(specs: list[Spec]) -> list[Spec]:
    """The specs, each once, plain training in front."""
    unique = list({str(spec): spec for spec in specs}.values())
    if not unique:
        raise LabError("a comparison needs at least one method.")
    plain = next((spec for spec in unique if str(spec) == "sgd"), unique[0])
    return [plain, *(spec for spec in unique if spec is not plain)]


def costs(results: Sequence[Result], base: Sequence[Result]) -> dict[str, float]:
    """FLOPs and time as multiples of the baseline's, over pairs of runs; time on equal machines."""
    times = [
        a.cost_seconds / b.cost_seconds
        for a, b in zip(results, base, strict=True)
        if a.status == b.status == "finished" and b.cost_seconds > 0 and a.machine == b.machine
    ]
    found = {"flops": results[0].flops * results[0].steps / max(1, base[0].flops * base[0].steps)}
    if times:
        found["time"] = statistics.median(times)
    return found


def distinct_labels(rows: Sequence[Row]) -> list[str]:
    """The rows' labels, with the strength where several settings of one method stand side by side."""
    labels = [row.label for row in rows]
    return [
        f"{row.label.removesuffix(')')}{', ' if row.label.endswith(')') else ' ('}{row.strength})"
        if labels.count(row.label) > 1 and row.strength
        else row.label
        for row in rows
    ]


def judged(rows: list[Row]) -> tuple[Row, ...]:
    """The rows with distinct labels, differences to the first, corrected over all, and costs."""
    base = rows[0]
    together = Comparison(Config(), (), tuple(rows))
    better_up = base.results[0].higher_is_better
    differences = compare_all(
        [together.paired(row.spec, base.spec) for row in rows[1:]], higher_is_better=better_up
    )
    judged = []
    found = zip(rows, distinct_labels(rows), [None, *differences], strict=True)
    for row, name, difference in found:
        cost = costs(row.results, base.results)
        judged.append(Row(row.spec, name, row.chosen, row.results, row.trials, difference, cost))
    return tuple(judged)
