"""The top of the page: three cards, and what to notice, also where it contradicts the methods."""

from __future__ import annotations

from collections.abc import Iterator

from steppe.lab.comparison import Row
from steppe.lab.sentences import (
    HIGHER_IS_BETTER,
    NAMES,
    comparison_sentence,
    interval_words,
    metric_digits,
    shown_metric,
)
from steppe.lab.statistics import compare_all, mean_std
from steppe.lab.survival import UNCHANGED, cell_digits, survival_cells, survival_sentence
from steppe.lab.tables import join_words
from steppe.report.charts import shown, tag, text
from steppe.report.gathered import Gathered
from steppe.report.survival import shared_curves, unchanged_at


def summary(gathered: Gathered) -> str:
    """Cards and a list, as markup."""
    cards = [
        tag("div", tag("p", text(title), class_="kicker"), tag("p", text(big), class_="big"),
            tag("p", text(words), class_="note"), class_="card")
        for title, big, words in _cards(gathered)
    ]  # fmt: skip
    items = [tag("li", text(words)) for words in notices(gathered)]
    title = tag("h2", "What to notice")
    return tag("div", *cards, class_="cards") + (title + tag("ul", *items) if items else "")


def best_row(gathered: Gathered) -> Row | None:
    """Of the methods that are significantly better than the baseline the one with the best mean."""
    rows = [
        (row.difference.mean, row)
        for row in gathered.rows[1:]
        if row.difference is not None and row.difference.verdict == "better"
    ]
    pick = max if gathered.comparison.example.higher_is_better else min
    return pick(rows, key=lambda pair: pair[0])[1] if rows else None


def _cards(gathered: Gathered) -> Iterator[tuple[str, str, str]]:
    comparison = gathered.comparison
    base, example, best = comparison.baseline, comparison.example, best_row(gathered)
    digits = metric_digits(comparison)
    name = shown_metric(example.metric)
    if best is None:
        words = f"No method is significantly better than {base.label} in test {name}."
        yield "Best method", "none", words
    else:
        mean = mean_std(best.values("test", example.metric))[0]
        gain = f"{interval_words(best.difference, digits)} {example.unit}".strip()
        words = f"{gain} over {base.label}, to a test {name} of {mean:.{digits}f}"
        strength = f"; {best.strength}" if best.strength else ""
        yield "Best method", best.label, f"{words}{strength}. {len(comparison.seeds)} seeds, Holm."
    timed = [row for row in gathered.rows[1:] if "time" in row.cost]
    if timed:
        dear = best or max(timed, key=lambda row: row.cost["time"])
        rest = [f"{r.label} {r.cost['time']:.2f}" for r in timed if r is not dear]
        words = f"Training time of {dear.label}, in multiples of {base.label}'s"
        words += f" ({', '.join(rest)})" if rest else ""
        cost = dear.cost["time"]
        yield "What it costs", f"{cost:.2f} ×", f"{words}; FLOPs {dear.cost['flops']:.2f} ×."
    yield from _compression_card(gathered)


def _compression_card(gathered: Gathered) -> Iterator[tuple[str, str, str]]:
    """The change that costs the baseline most, and what it leaves every method."""
    comparison = gathered.comparison
    cells = [cell for cell in survival_cells(comparison) if cell.values]
    base, sign = comparison.baseline, 1 if comparison.example.higher_is_better else -1
    mine = [c for c in cells if c.row is base and c.change != UNCHANGED]
    if not mine or len(comparison.rows) < 2:
        return
    hardest = min(mine, key=lambda cell: sign * mean_std(cell.values)[0])
    digits, way = cell_digits(comparison), hardest.statistics
    after, before = (
        {c.row.label: mean_std(c.values)[0] for c in cells if (c.change, c.statistics) == (at, way)}
        for at in (hardest.change, UNCHANGED)
    )
    each = [f"{name} {before[name]:.{digits}f} → {left:.{digits}f}" for name, left in after.items()]
    span = " to ".join(f"{end:.{digits}f}" for end in (min(after.values()), max(after.values())))
    words = f"Test {shown_metric(comparison.example.metric)} before and after"
    words += f", BatchNorm {way}" * (len({cell.statistics for cell in cells}) > 1)
    title, change = "What survives compression", hardest.change.partition(",")[0]
    yield title, f"{span} at {change}", f"{words}: {join_words(each)}."


def notices(gathered: Gathered) -> list[str]:
    """What the numbers say, first the verdict, then what it leaves out."""
    comparison = gathered.comparison
    found = [comparison_sentence(comparison), survival_sentence(comparison)]
    found += [*_other_metrics(gathered), *_flatness(gathered), *_lost(gathered)]
    return [words for words in found if words]


def _other_metrics(gathered: Gathered) -> Iterator[str]:
    """Metrics that do not decide and got significantly worse (NLL, calibration)."""
    base = gathered.comparison.baseline
    example = gathered.comparison.example
    for name in example.metrics["test"]:
        if name == example.metric or name not in HIGHER_IS_BETTER:
            continue
        pairs = [
            [a.metrics["test"][name] - b.metrics["test"][name] for a, b in row.pairs(base)]
            for row in gathered.rows[1:]
        ]
        tested = compare_all(pairs, higher_is_better=HIGHER_IS_BETTER[name])
        worse = [
            f"{row.label} {shown(mean_std(row.values('test', name))[0], 3)}"
            for row, found in zip(gathered.rows[1:], tested, strict=True)
            if found.verdict == "worse"
        ]
        if worse:
            known = {"ece": "Calibration (ECE %)", "nll": "NLL"}
            said = known.get(name, NAMES.get(name, name))
            usual = shown(mean_std(base.values("test", name))[0], 3)
            yield f"{said} got significantly worse: {base.label} {usual}, {join_words(worse)}."


def _flatness(gathered: Gathered) -> Iterator[str]:
    """Which analysed minima are flatter than the baseline's, and which are sharper."""
    for name in gathered.analyses:
        if not name.startswith(("spectrum", "sharpness")):
            continue
        number = "largest" if name == "spectrum" else "value"
        known = {i: getattr(result, number) for i, result in gathered.results(name).items()}
        if 0 not in known or len(known) < 2:
            continue
        parts = []
        for word, rows in (
            ("lower", [i for i, v in known.items() if v < known[0]]),
            ("higher", [i for i, v in known.items() if i and v >= known[0]]),
        ):
            each = [f"{gathered.rows[i].label} {shown(known[i], 3)}" for i in rows]
            parts += [f"{word} for {join_words(each)}"] if each else []
        case = name.removeprefix("sharpness-").replace("-", " case, ")
        what = "The largest Hessian eigenvalue" if name == "spectrum" else f"Sharpness ({case})"
        base = gathered.rows[0].label
        yield f"{what} of one run a method ({base} {shown(known[0], 3)}): {'; '.join(parts)}."


def _lost(gathered: Gathered) -> Iterator[str]:
    """Changes after which the baseline has the best mean of all, by BatchNorm's statistics and panel."""
    groups = gathered.every("robustness")
    if 0 not in groups or len(groups) < 2 or (found := shared_curves(groups)) is None:
        return
    sign, curves = (1 if found[0] else -1), found[1]
    for way, panels in curves[0].items():
        lost = []
        for panel, points in panels.items():
            sizes = [
                shown(size, 3)
                for k, (size, mine, _) in enumerate(points)
                if size != unchanged_at(panel)
                and all(sign * mine > sign * of[way][panel][k][1] for i, of in curves.items() if i)
            ]
            lost += [f"{panel}: {join_words(sizes)}"] if sizes else []
        if lost:
            about = f", BatchNorm {way}," * (len(curves[0]) > 1)
            base = gathered.rows[0].label
            yield f"After these changes{about} {base} has the best mean of all ({'; '.join(lost)})."
