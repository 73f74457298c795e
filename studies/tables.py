"""The tables of the pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats

from steppe.lab.cost import costs
from steppe.lab.results import Result
from steppe.lab.sentences import interval_words, p_words
from steppe.lab.specs import label, parse
from steppe.lab.statistics import ENOUGH, Difference, half_width, mean_std, mean_words
from steppe.lab.tables import Table, signed
from studies.comparisons import Pairs, compared, place_of
from studies.definitions import LENGTHS, METHODS, Setting
from studies.findings import (
    DOUBLED,
    HOW,
    JUDGED,
    Claim,
    Findings,
    Row,
    adaptive,
    asked,
    matching,
    mixing,
    ordering,
)
from studies.minima import radius_words
from studies.plan import Part, at_length

MEASURES = {
    "largest eigenvalue": "largest_eigenvalue",
    "adaptive sharpness": "adaptive_sharpness",
    "‖w‖": "weight_norm",
}
"""What was measured at the minima, by its column."""


def gains_table(found: Sequence[Findings]) -> Table | None:
    """What each method gains at its default strength, a row for each setting."""
    rows = []
    for findings in found:
        for setting in findings.study.settings:
            base, *others = (
                findings.row(setting, "defaults", setting.called(method)) for method in METHODS
            )
            n = len(base.finished)
            cells = [_gain(findings.gain(setting, row), n) for row in others]
            if any(cell != "–" for cell in cells):
                place = place_of(findings.study, setting)
                rows.append((place, f"{base.mean():.2f}", *cells, str(n)))
    names = [label(parse(method), "sgd") for method in METHODS[1:]]
    note = (
        f"**Bold**: significant. In brackets: pairs of seeds, where they are fewer than n or {ENOUGH}; "
        f"below {ENOUGH} nothing is tested. SAM and MSAM are secondary."
    )
    header = ("setting", "baseline, %", *names, "n")
    return Table(header, tuple(rows), notes=(note,)) if rows else None


def _gain(gain: Difference | None, n: int) -> str:
    if gain is None:
        return "–"
    significant = gain.n >= ENOUGH and gain.verdict in ("better", "worse")
    mean = f"**{signed(gain.mean)}**" if significant else signed(gain.mean)
    return mean if gain.n == n >= ENOUGH else f"{mean} ({gain.n})"


def paper_table(found: Sequence[Findings]) -> Table | None:
    """The paper's claims about accuracy, and how often these runs agree at default strengths."""
    claims: dict[str, tuple[str, Pairs]] = {
        "RWP improves on SGD": ("RWP − SGD", lambda s: [(s.called("rwp"), s.baseline)]),
        "The adaptive form helps": ("ARWP − RWP, m-ARWP − m-RWP", adaptive),
        "Mixing helps beyond its second batch": (f"m-ARWP − {DOUBLED}", mixing),
        "m-ARWP is at or above SAM": ("m-ARWP − SAM", matching),
        "The order of its six methods": ("each − the one below it", ordering),
    }
    rows = []
    for claim, (what, pairs) in claims.items():
        made = [each.difference for each in compared(found, pairs)]
        if made:
            verdicts = [each.verdict for each in made]
            counts = [verdicts.count(v) for v in ("better", "worse", "no difference seen")]
            means = [each.mean for each in made]
            span = f"{signed(min(means))} to {signed(max(means))}"
            rows.append((claim, what, *map(str, counts), span))
    header = ("claim", "compared", "supported", "contradicted", "not significant", "means")
    return Table(header, tuple(rows)) if rows else None


def result_table(findings: Findings, setting: Setting, part: Part) -> Table | None:
    """Accuracy, difference to the baseline, NLL, BatchNorm both ways, cost; None without runs."""
    # Weight decay does not change the time: an untuned baseline serves where the tuned one cannot.
    bases = [findings.row(setting, each, setting.baseline) for each in (part, JUDGED[0])]
    rows = []
    for row in findings.rows(setting, part):
        gain, finished = findings.gain(setting, row), row.finished
        lost = len(row.lines) - len(finished)
        nll = mean_words([result.metrics["test"]["nll"] for result in finished.values()], ".3f")
        rows.append(
            (
                row.name,
                row.strength,
                _mean(finished, "test") if finished else "diverged",
                interval_words(gain, 2),
                "–" if gain is None else p_words(gain),
                nll.partition(" ")[0],
                _mean(finished, "test_recomputed"),
                _lowest_factor(row),
                *_cost(row, *bases),
                f"{len(finished)}" + (f" ({lost} diverged)" if lost else ""),
            )
        )
    header = (
        *("method", "strength", "accuracy %", f"− {setting.baseline} [interval]", "p (Holm)"),
        *("NLL", "accuracy %, BN recomputed", "adaptive factor", "time ×", "FLOPs ×", "n"),
    )
    twice = setting.reference("m-")
    notes = (f"Mixed methods: − {twice}.",) if twice != setting.baseline else ()
    return Table(header, tuple(rows), f"{setting.title}, {HOW[part]}", notes) if rows else None


def _mean(results: dict[int, Result], split: str) -> str:
    return mean_words([r.metrics[split][r.metric] for r in results.values() if split in r.metrics])


def _lowest_factor(row: Row) -> str:
    """The smallest median adaptive factor of any epoch and seed: 1 is no adaptation."""
    curves = [line.curves["factor"] for line in row.lines.values() if line.curves.get("factor")]
    lowest = min(map(min, curves), default=1.0)
    return "–" if lowest == 1 else f"{lowest:.3f}"


def _cost(row: Row, *bases: Row) -> list[str]:
    """Time and FLOPs as multiples of a baseline's: of the first that ran on the same machine."""
    found: dict[str, float] = {}
    for base in bases:
        seeds = sorted(row.lines.keys() & base.lines.keys())
        if seeds and "time" not in found:
            found |= costs(*([each.lines[s].result for s in seeds] for each in (row, base)))
    return [f"{found[kind]:.2f}" if kind in found else "–" for kind in ("time", "flops")]


def pairs_table(findings: Findings) -> Table | None:
    """The comparisons between two methods, with their intervals."""
    rows = []
    for setting in findings.study.settings:
        for part in JUDGED:
            for pair in asked(setting):
                made = findings.differences.get(Claim(setting.name, part, *pair))
                if made is None:
                    continue
                strengths = [findings.row(setting, part, name).strength for name in pair]
                rows.append(
                    (
                        f"{setting.title}, {HOW[part]}",
                        " − ".join(pair),
                        " and ".join(dict.fromkeys(strengths)),
                        interval_words(made, 2),
                        made.verdict.replace("no difference seen", "not significant"),
                        f"{made.smallest:.2f}" if made.n > 1 else "–",
                        str(made.n),
                    )
                )
    header = (
        *("setting", "compared", "strengths", "points [interval]", "verdict"),
        *("minimum detectable difference", "n"),
    )
    return Table(header, tuple(rows), "Comparisons between methods") if rows else None


def lengths_table(findings: Findings, setting: Setting) -> Table | None:
    """What the methods gain over the baseline trained for as many steps, at several lengths."""
    rows = []
    lengths = sorted((1.0, *LENGTHS))
    for name in map(setting.called, setting.lengths[1:]):
        cells = []
        for length in lengths:
            pair = (at_length(name, length), at_length(setting.baseline, length))
            part: Part = "defaults" if length == 1 else "lengths"
            values = findings.pairs(Claim(setting.name, part, *pair))
            mean, std = mean_std(values)
            wide = f" ± {half_width(std, len(values)):.2f}" if len(values) > 1 else ""
            cells.append(f"{signed(mean)}{wide}" if values else "–")
        rows.append((name, *cells))
    if all(cell == "–" for row in rows for cell in row[1:]):
        return None
    header = ("method", *(f"{length:g} × the steps" for length in lengths))
    title = f"Gain at other lengths of training: {setting.title}, default strengths"
    note = "Points ± half of the 95 % t-interval over paired seeds, uncorrected."
    return Table(header, tuple(rows), title, (note,))


def sweeps_table(findings: Findings, setting: Setting) -> Table | None:
    """Accuracy on training and test data at every point of the sweeps (the paper's Figures 2 to 4)."""
    names = dict.fromkeys(entry.name for entry in findings.plan.of(setting, "sweeps"))
    rows = []
    for name in names:
        found = findings.row(setting, "sweeps", name).finished
        if found:
            title, _, point = name.partition(": ")
            cells = [_mean(found, split) for split in ("train", "test")]
            rows.append((title, point, *cells, str(len(found))))
    header = ("sweep", "point", "training accuracy %", "accuracy %", "n")
    title = f"Sweeps: {setting.title}, what is not varied at its default"
    return Table(header, tuple(rows), title) if rows else None


def minima_table(findings: Findings, setting: Setting, part: Part) -> Table | None:
    """All measures by method, mean ± standard deviation over seeds; None without any."""
    rows, failed, ranked = [], [], []
    for row in findings.rows(setting, part):
        minima = [line.minima for line in row.lines.values()]
        failed += [f"{row.name}: {each['failed']}" for each in minima if "failed" in each]
        known = [each for each in minima if each.get("largest_eigenvalue") is not None]
        if known:
            values = [
                [each[key] for each in known if each.get(key) is not None]
                for key in MEASURES.values()
            ]
            cells = [mean_words(each, ".3g", ".2g") for each in values]
            rows.append((row.name, *cells, str(len(known))))
            if row.name in map(setting.called, setting.methods):
                ranked.append([row.mean(), *(mean_std(each)[0] for each in values)])
    if not rows:
        return None
    lines = findings.evidence.lines.values()
    how = next(line.minima for line in lines if "samples" in line.minima)
    notes = [
        f"On {how['samples']} un-augmented training images, the same for all; BatchNorm statistics "
        "recomputed on them wherever the weights are. Adaptive sharpness: the largest rise of the "
        f"loss within ‖eps / |w|‖ ≤ {how['sharpness_rho']:g}, parts of 128 images."
    ]
    if len(ranked) > 2:
        scores, *measures = zip(*ranked, strict=True)
        found = [
            f"{column} {signed(float(stats.spearmanr(scores, measured).statistic))}"
            for column, measured in zip(MEASURES, measures, strict=True)
            if len(set(measured)) > 1 and len(set(scores)) > 1
        ]
        notes.append(
            f"Rank correlation with mean accuracy over {len(ranked)} methods: {', '.join(found)}."
        )
    shown = findings.row(setting, part, setting.baseline).lines.get(0)
    if shown is not None and "radius" in shown.minima:
        notes.append(radius_words(shown.minima["radius"]))
    if failed:
        notes.append(f"{len(failed)} models could not be measured; the first: {failed[0]}")
    title = f"Minima: {setting.title}, {HOW[part]}"
    return Table(("method", *MEASURES, "n"), tuple(rows), title, tuple(notes))


def trials_table(findings: Findings, setting: Setting) -> Table | None:
    """What the trials found for every strength, of the methods whose trials are done."""
    rows = []
    for method, choice in findings.plan.choices[setting.name].items():
        kind = choice.spec.strength[0] if choice.spec.strength else "weight decay"
        values = sorted(choice.scores)
        best = max(values, key=lambda value: choice.scores[value])
        cells = []
        for value in values:
            score = choice.scores[value]
            words = f"{value:g}: {score:.1f}" if math.isfinite(score) else f"{value:g}: diverged"
            cells.append(f"**{words}**" if value == best else words)
        rows.append((setting.called(method), f"{kind} {', '.join(cells)}", str(choice.trials)))
    if not rows or setting.tune is None:
        return None
    header = ("method", "strength: accuracy % on validation data, the chosen one in bold", "trials")
    title = f"Trials: {setting.title}, means over {setting.tune.seeds} seeds"
    return Table(header, tuple(rows), title)
