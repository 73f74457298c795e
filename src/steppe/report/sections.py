"""The sections of the page about training: table, accuracy, convergence, cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from steppe.lab.comparison import Row
from steppe.lab.sentences import NAMES, comparison_sentence, comparison_table, shown_metric
from steppe.lab.statistics import half_width, mean_std
from steppe.lab.tables import signed
from steppe.report.charts import Interval, Series, interval_chart, key, line_chart, shown, tag, text
from steppe.report.gathered import Gathered


@dataclass(frozen=True)
class Section:
    """A heading and markup; `key` names it in links."""

    key: str
    title: str
    body: str


@dataclass(frozen=True)
class Absent:
    """A section without data, and the command that makes them."""

    title: str
    command: str


Part = Callable[[Gathered], Section | Absent]


def result_section(gathered: Gathered) -> Section:
    """The comparison's table, with its notes."""
    table = comparison_table(gathered.comparison)
    # The sentence stands at the top of the page.
    notes = [note for note in table.notes if note != comparison_sentence(gathered.comparison)]
    body = html_table(table.header, table.rows, first="method") + note(*notes)
    return Section("result", "Result", body)


def accuracy_section(gathered: Gathered) -> Section:
    """The deciding metric with intervals and single seeds, and the differences from the baseline."""
    comparison, example = gathered.comparison, gathered.comparison.example
    metric, base = example.metric, comparison.baseline.label
    name = NAMES.get(metric, metric)
    form = (lambda v: f"{v:.2f}") if example.unit else shown
    means, differences = [], []
    for index, row in enumerate(comparison.rows):
        low, mean, high = interval(row, metric)
        values = row.values("test", metric)
        words = form(mean) + (f" [{form(low)}, {form(high)}]" if math.isfinite(low) else "")
        if not values:
            words = "diverged"
        means.append(Interval(row.label, index, mean, low, high, words, values))
        found = row.difference
        if found is not None and found.n:
            words = f"{signed(found.mean, 2 if example.unit else 4)}, {found.verdict}"
            ends = (found.mean, found.low, found.high)
            hollow = found.verdict in ("no difference seen", "too few seeds")
            differences.append(Interval(row.label, index, *ends, words, hollow=hollow))
    way = "higher" if example.higher_is_better else "lower"
    about = (
        f"Test {shown_metric(metric)} of the final model ({way} is better): mean with its 95 % interval, and each "
        "seed as a dot."
    )
    charts = [captioned(interval_chart(means, f"test {name}"), about)]
    if differences:
        chart = interval_chart(differences, f"test {name}, minus {base}", zero=True)
        about = (
            f"Paired difference from {base}, Holm-corrected interval. Filled marks: significant; "
            "hollow marks: not significant."
        )
        charts.append(captioned(chart, about))
    plain = shown_metric(metric)
    return Section("accuracy", f"{plain[0].upper()}{plain[1:]} with intervals", columns(charts))


def convergence_section(gathered: Gathered) -> Section | Absent:
    """Test metric and training loss by epoch, means over seeds."""
    metric = gathered.comparison.example.metric
    epochs = {i: found for i, row in enumerate(gathered.rows) if (found := gathered.epochs(row))}
    charts = []
    name = NAMES.get(metric, metric)
    about = "mean over the seeds"
    for column, label, words in (
        (f"test_{metric}", f"test {name}", f"Test {shown_metric(metric)} by epoch, {about}."),
        (f"train_{metric}", f"train {name}",
         f"The same on training data, at the true weights, {about}."),
        ("loss", "training loss", "Training loss as the optimizer saw it, that is, at perturbed "
         f"weights for the methods that perturb; {about}."),
    ):  # fmt: skip
        curves = {i: mean_curve(runs, column) for i, runs in epochs.items()}
        series = [Series(gathered.rows[i].label, i, c) for i, c in curves.items() if len(c) > 1]
        if series:
            chart = line_chart(series, "epoch", label, log_y=column == "loss")
            charts.append(captioned(chart, words))
    if not charts:
        return Absent("Convergence", "steppe compare … --eval-every 1 (runs kept in a store)")
    return Section("convergence", "Convergence", legend(gathered, epochs) + columns(charts))


def cost_section(gathered: Gathered) -> Section | Absent:
    """What a method costs against what it gives."""
    comparison = gathered.comparison
    metric, base = comparison.example.metric, comparison.baseline.label
    charts = []
    kinds = {
        "time": ("training time", "Time of the training steps, median over the seeds."),
        "flops": ("FLOPs", "Matrix products and convolutions, counted by torch."),
    }
    for kind, (label, about) in kinds.items():
        spots = []
        for index, row in enumerate(comparison.rows):
            _, mean, high = interval(row, metric)
            if kind in row.cost and row.finished:
                spots.append(Series(row.label, index, [(row.cost[kind], mean)], [high - mean]))
        if spots:
            x_label, y_label = f"{label}, multiples of {base}", f"test {NAMES.get(metric, metric)}"
            chart = line_chart(spots, x_label, y_label, whole=True)
            charts.append(captioned(chart, f"{about} Bars: 95 % intervals."))
    if not charts:
        return Absent("Cost", "steppe compare …")
    names = legend(gathered, [i for i, row in enumerate(gathered.rows) if row.finished])
    return Section("cost", f"Cost against {shown_metric(metric)}", names + columns(charts))


def interval(row: Row, metric: str) -> tuple[float, float, float]:
    """Low end, mean and high end of the 95 % interval of the mean; infinite for one seed."""
    values = row.values("test", metric)
    mean, std = mean_std(values)
    wide = half_width(std, len(values))
    return mean - wide, mean, mean + wide


def mean_curve(runs: Sequence[Sequence[dict[str, float]]], name: str) -> list[tuple[float, float]]:
    """(epoch, mean over runs) wherever all runs have the number."""
    found: dict[float, list[float]] = {}
    for records in runs:
        for record in records:
            if isinstance(record.get(name), int | float):
                found.setdefault(record["epoch"], []).append(record[name])
    return [
        (float(epoch), sum(values) / len(values))
        for epoch, values in sorted(found.items())
        if len(values) == len(runs)
    ]


def legend(gathered: Gathered, rows: Iterable[int]) -> str:
    """Names of rows with their marks; pressing one brings its lines to the front."""
    items = []
    for index in rows:
        sample, kind = key(index)
        button = tag("button", sample, text(gathered.rows[index].label), type="button",
                     aria_pressed="false", data_pick=index, class_=kind)  # fmt: skip
        items.append(tag("li", button))
    return tag("ul", *items, class_="legend")


def note(*notes: str) -> str:
    """Small print, a paragraph each."""
    return "".join(tag("p", text(words), class_="note") for words in notes)


def advice(words: str, command: str, kind: str = "note") -> str:
    """Words and the command that they lead to."""
    return tag("p", text(words), tag("code", text(command)), class_=kind)


def captioned(chart: str, words: str) -> str:
    """A chart with a caption."""
    return tag("figure", chart, tag("figcaption", text(words)))


def columns(parts: Sequence[str]) -> str:
    """Charts beside each other where there is room."""
    return tag("div", *parts, class_="columns")


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, first: str = "", kind: str = ""
) -> str:
    """A table; on a phone each row is a block of its own, named by its first column."""
    head = "".join(tag("th", text(name), scope="col") for name in header)
    body = "".join(
        tag("tr", tag("th", text(row[0]), scope="row"),
            *(tag("td", text(c), data_label=n) for n, c in zip(header[1:], row[1:], strict=True)))
        for row in rows
    )  # fmt: skip
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", body), class_=kind or None)
    about = f"Table: {first or header[0]}"
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=about)
