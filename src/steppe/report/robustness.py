"""The section of the page about what survives compression, noise and worse inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steppe.analysis import Robustness
from steppe.lab.statistics import mean_std
from steppe.lab.survival import survival_table
from steppe.report.charts import Series, line_chart
from steppe.report.gathered import Gathered
from steppe.report.minima import origin_words
from steppe.report.sections import Absent, Section, captioned, columns, html_table, legend
from steppe.report.survival import BACKWARDS, has_accuracy, measured_alike, survival_curves
from steppe.report.svg import shown, tag, text

Groups = Mapping[int, Sequence[Robustness]]


def robustness_section(gathered: Gathered) -> Section | Absent:
    """The comparison's table after compression, and a chart for each change that was analysed."""
    body = _compressed(gathered)
    groups = {
        index: [result for result in by_seed.values() if isinstance(result, Robustness)]
        for index, by_seed in gathered.every("robustness").items()
    }
    if groups:
        body += _charts(gathered, groups)
    elif body:
        more = gathered.command("steppe analyze robustness")
        words = text("Other sizes of these changes, noise and worse inputs: ")
        body += tag("p", words, tag("code", text(more)), class_="note")
    if not body:
        return Absent("Robustness", gathered.command("steppe analyze robustness"))
    return Section("robustness", "Robustness", body)


def _compressed(gathered: Gathered) -> str:
    table = survival_table(gathered.comparison)
    if table is None:
        return ""
    notes = [f"{table.title}.", *table.notes]
    return html_table(table.header, table.rows, first="method after compression") + "".join(
        tag("p", text(note), class_="note") for note in notes
    )


def _charts(gathered: Gathered, groups: Groups) -> str:
    every = [one for group in groups.values() for one in group]
    if len({measured_alike(one) for one in every}) != 1:
        words = (
            "The stored analyses of robustness were not measured alike (other seeds, samples or "
            "settings), so they are not drawn together. Analyse again: "
        )
        command = gathered.command("steppe analyze robustness --again")
        return tag("p", text(words), tag("code", text(command)), class_="note")
    accuracy = has_accuracy(every)
    label = "accuracy %" if accuracy else "loss"
    curves = {index: survival_curves(group, accuracy) for index, group in groups.items()}
    charts = []
    for statistics in every[0].statistics:
        for panel in next(iter(curves.values()))[statistics]:
            series = [
                Series(
                    gathered.rows[index].label,
                    index,
                    [(x, y) for x, y, _ in its[statistics][panel]],
                    [half for *_, half in its[statistics][panel]],
                )
                for index, its in curves.items()
            ]
            way = f", BatchNorm {statistics}" if len(every[0].statistics) > 1 else ""
            charts.append(_chart(series, panel, way, label))
    named = [Series(gathered.rows[index].label, index, ()) for index in groups]
    notes = [_borne(gathered, groups), _about(groups), _origin(groups)]
    return (
        legend(named)
        + columns(charts)
        + "".join(tag("p", text(note), class_="note") for note in notes if note)
    )


def _chart(series: Sequence[Series], panel: str, way: str, label: str) -> str:
    worst = 0 if panel.startswith(BACKWARDS) else -1
    ends = "; ".join(f"{s.name} {shown(s.points[worst][1], 3)}" for s in series)
    at = shown(series[0].points[worst][0])
    caption = f"{panel[0].upper()}{panel[1:]}{way}."
    summary = f"{label} against {panel}{way}. At {at}: {ends}"
    return captioned(line_chart(series, panel, label, summary), caption)


def _borne(gathered: Gathered, groups: Groups) -> str:
    """`Largest weight noise borne at a loss of 1 point …: SGD 0.05; RWP 0.2.`"""
    every = [one for group in groups.values() for one in group]
    if any(one.draws < 2 or bool(one.accuracy.isnan().all()) for one in every):
        return ""
    parts = [
        f"{gathered.rows[index].label} {shown(mean_std([r.noise_borne() for r in group])[0], 2)}"
        for index, group in groups.items()
    ]
    return (
        "Largest ratio of weight noise at which the mean accuracy falls by at most one point, with "
        f"95 % confidence over draws (mean over runs): {'; '.join(parts)}."
    )


def _about(groups: Groups) -> str:
    runs = len(next(iter(groups.values())))
    if runs == 1:
        return "One run a method; bars are the standard deviation over draws of noise."
    return f"Mean over {runs} runs a method, of the same seeds, with its 95 % interval."


def _origin(groups: Groups) -> str:
    """On what it was measured; methods must share the samples of a seed, seeds may differ."""
    said = [origin_words(same_seed) for same_seed in zip(*groups.values(), strict=True)]
    return next((words for words in said if words.startswith("Not")), said[0])
