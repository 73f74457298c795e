"""`compare`: methods × seeds, paired, with statistics, cost and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from steppe.lab.compression import with_compression
from steppe.lab.config import Config, as_config
from steppe.lab.cost import costs
from steppe.lab.engines import Engine, Job, chosen, run_all, seed_numbers
from steppe.lab.errors import LabError
from steppe.lab.problems import ModelFn, Sources
from steppe.lab.progress import Progress
from steppe.lab.ranks import world
from steppe.lab.results import Result
from steppe.lab.runs import DEFAULT_STORE
from steppe.lab.sentences import comparison_sentence, comparison_table
from steppe.lab.specs import Spec, as_spec, label, usual_methods
from steppe.lab.statistics import Difference, compare_all, mean_std
from steppe.lab.survival import survival_cells, survival_numbers, survival_sentence, survival_table
from steppe.lab.tables import Format, Table, as_csv, terminal_width
from steppe.lab.tasks import Task
from steppe.lab.tuning import Choice, Tune, tune_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from steppe import Method


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
        """`ratio 0.6`; empty for the baseline."""
        used = next((result.strength for result in self.results if result.strength), None)
        return f"{used[0]} {used[1]:g}" if used else ""

    def values(self, split: str, metric: str) -> list[float]:
        """A metric of all finished seeds."""
        return [result.metrics[split][metric] for result in self.finished]

    def gaps(self) -> list[float]:
        """By how much the training data flatters the deciding metric, per seed."""
        pairs = [(result.score("train"), result.score("test")) for result in self.finished]
        up = self.results[0].higher_is_better
        return [train - test if up else test - train for train, test in pairs]

    def pairs(self, other: Row) -> list[tuple[Result, Result]]:
        """Its runs and the other's, on the seeds that both finished."""
        both = zip(self.results, other.results, strict=True)
        return [(a, b) for a, b in both if a.status == b.status == "finished"]

    def gains(self, other: Row, split: str = "test") -> list[float]:
        """Its deciding metric minus the other's, on the seeds that both finished."""
        return [a.score(split) - b.score(split) for a, b in self.pairs(other)]


@dataclass(frozen=True, repr=False)
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

    @property
    def others(self) -> list[str]:
        """The metrics that do not decide."""
        test = self.example.metrics["test"]
        return [name for name in test if name not in (self.example.metric, "loss")]

    def paired(self, spec: str, other: str, split: str = "test") -> list[float]:
        """Differences in the deciding metric, `spec` minus `other`, on the seeds both finished."""
        return self.row(spec).gains(self.row(other), split)

    def row(self, name: str) -> Row:
        """A row by its spec, its label, or its method's name."""
        for row in self.rows:
            if name in (row.spec, row.label, row.spec.partition(":")[0]):
                return row
        known = ", ".join(row.label for row in self.rows)
        raise LabError(f"this comparison has no method {name!r}, only {known}.")

    def table(self, form: Format = "text", width: int | None = None) -> str:
        """The table as text (in lines of at most `width`, if given) or Markdown; as CSV, bare
        numbers."""
        if form == "csv":
            return as_csv(self._records())
        return "\n\n".join(table.render(form, width) for table in self._tables())

    def _records(self) -> list[dict[str, Any]]:
        """Each row's numbers by name, for programs."""
        records = []
        for row in self.to_dict()["rows"]:
            record = {"method": row["label"]}
            record |= {name: row[name] for name in ("spec", "strength", "chosen", "trials", "n")}
            record |= {f"{self.example.metric}_{name}": row[name] for name in ("mean", "std")}
            if found := row["difference"]:
                names = ("low", "high", "p", "p_holm", "verdict")
                record |= {"difference": found["mean"], **{name: found[name] for name in names}}
            record |= {"gap": row["gap"], **row["test"], **row["cost"], **row["compressed"]}
            records.append(record)
        return records

    def __str__(self) -> str:
        return self.table(width=terminal_width())

    def __repr__(self) -> str:
        names = ", ".join(row.label for row in self.rows)
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        return f"<Comparison of {names} on {seeds}; print it for the table>"

    def plot(self) -> Figure:
        """A matplotlib figure: the metric with its intervals, and the differences from the baseline."""
        from steppe.report.pictures import comparison_figure

        return comparison_figure(self)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the HTML page about this comparison and give its path."""
        from steppe.report.gathered import Gathered
        from steppe.report.page import write_page

        file = Path(path)
        if file.suffix not in (".html", ".htm"):
            raise LabError(f"the report {file} must have a name that ends in .html.")
        return write_page(Gathered(self), file)

    def sentence(self) -> str:
        """Which methods differ from the baseline, and which do not, in a sentence."""
        return " ".join(filter(None, [comparison_sentence(self), survival_sentence(self)]))

    def _tables(self) -> list[Table]:
        compressed = survival_table(self)
        return [comparison_table(self), *([] if compressed is None else [compressed])]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        metric, split, cells = self.example.metric, "test", survival_cells(self)
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
                    "gap": mean_std(row.gaps())[0],
                    "test": {name: mean_std(row.values(split, name))[0] for name in self.others},
                    "compressed": survival_numbers(cells, row),
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
    data: Any = None,
    methods: Sequence[str | Spec | Method] | None = None,
    seeds: int | Sequence[int] = 3,
    *,
    config: Config | Mapping[str, object] | None = None,
    task: Task | str | None = None,
    tune: Tune | bool = False,
    store: str | Path | None = DEFAULT_STORE,
    jobs: int | None = None,
    engine: Engine | Literal["local", "ray"] = "local",
    robustness: bool = True,
    progress: Progress = None,
) -> Comparison:
    """Train all methods on all seeds, each seed from the same weights and data order, and compare.

    Args:
        model: A function or class that makes a new model, or the name of one.
        data: `(train, test)` or `(train, test, validation)`, each a pair of tensors or arrays, a
            dataset or a DataLoader; a `Data`; a function of the seed that gives one of these; or a
            name, a folder or a CSV file.
        methods: Texts such as "arwp:ratio=.6", or methods such as `steppe.arwp(ratio=0.6)`. The
            first "sgd" without settings of its own is the baseline; without one, the first method. By
            default the paper's six, and "rwp:rise=0.2" where robustness is shown.
        seeds: How many seeds, or which.
        config: Everything else (epochs, batch, lr …): a `Config` or a mapping of its fields.
        task: A `Task`, or "classification", "regression" or module:function.
        tune: Choose each method's strength on a validation split first; a `Tune` says how. The setting
            for compression, a rise of 0.2, stays as it is.
        store: The folder of runs. Finished runs in it are reused. None keeps nothing.
        jobs: Train this many runs at a time in processes of their own, which share torch's threads
            where the config has no number. By default one after the other, on one thread.
        engine: "ray", or a `steppe.lab.ray_engine.Ray` with options, trains on a Ray cluster.
        robustness: Measure every model also after rounding to 4 and 3 bits and after pruning of 50
            and 80 % of its weights (needs a `store`, which keeps the models).
        progress: True or False shows or hides it; a function is called with each `Event`.
    """
    place = chosen(engine, jobs)
    data = str(data) if isinstance(data, Path) else data
    given: dict[str, Any] = {"model": model, "data": data, "task": task}
    names = {name: value for name, value in given.items() if isinstance(value, str)}
    sources = Sources(**{name: value for name, value in given.items() if name not in names})
    config = as_config(config)
    config = config.replace(threads=config.threads or place.threads, **names)

    def run(work: Sequence[Job], title: str) -> list[Result]:
        return run_all(work, sources, store, engine=place, progress=progress, title=title)

    if methods is None:
        methods = usual_methods(robustness=robustness)
    elif isinstance(methods, str):
        raise LabError(f'methods must be a list such as ["sgd", "rwp"], got {methods!r}.')
    unique = list({str(spec): spec for spec in map(as_spec, methods)}.values())
    if not unique:
        raise LabError("a comparison needs at least one method.")
    specs = sorted(unique, key=lambda spec: str(spec) != "sgd")  # the baseline in front
    numbers = seed_numbers(seeds, "comparison")
    with place.open() if tune else nullcontext():  # one cluster for both
        choices = [Choice(spec) for spec in specs]
        if tune:
            free = [spec for spec in specs if not spec.for_compression]
            tuned = iter(tune_all(free, config, tune if isinstance(tune, Tune) else Tune(), run))
            every = [Choice(s) if s.for_compression else next(tuned) for s in specs]
            # trials may find that very setting
            choices = list({str(choice.spec): choice for choice in reversed(every)}.values())[::-1]
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


def judged(rows: list[Row]) -> tuple[Row, ...]:
    """The rows with distinct labels, differences from the first, corrected over all, and costs."""
    base = rows[0]
    gains = [row.gains(base) for row in rows[1:]]
    differences = compare_all(gains, higher_is_better=base.results[0].higher_is_better)
    labels, found = [row.label for row in rows], []
    for row, difference in zip(rows, [None, *differences], strict=True):
        label = row.label
        if labels.count(label) > 1 and row.strength:  # several settings of one method
            joint = ", " if label.endswith(")") else " ("
            label = f"{label.removesuffix(')')}{joint}{row.strength})"
        cost = costs(row.results, base.results)
        found.append(replace(row, label=label, difference=difference, cost=cost))
    return tuple(found)
