"""The tables of the pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from steppe.lab.cost import costs
from steppe.lab.results import Result
from steppe.lab.sentences import interval_words, p_words
from steppe.lab.specs import label, parse
from steppe.lab.statistics import ENOUGH, Difference, mean_words
from steppe.lab.tables import Table, signed
from studies.comparisons import compared, places
from studies.definitions import METHODS, Setting
from studies.findings import CLAIMS, HOW, JUDGED, Claim, Findings, Pair, Row, asked
from studies.plan import Part

MEASURES = {
    "largest eigenvalue": "largest_eigenvalue",
    "adaptive sharpness": "adaptive_sharpness",
    "‖w‖": "weight_norm",
}
"""What was measured at the minima, by its column."""


def gains_table(found: Sequence[Findings]) -> Table | None:
    """What each method gains at its default strength, a row for each setting."""
    rows = []
    for place, findings, setting in places(found):
        names = map(setting.called, METHODS)
        base, *others = (findings.row(setting, "defaults", name) for name in names)
        n = len(base.finished)
        cells = [_gain(findings.gain(setting, row), n) for row in others]
        if any(cell != "–" for cell in cells):
            rows.append((place, f"{base.mean():.2f}", *cells, str(n)))
    methods = [label(parse(method)) for method in METHODS[1:]]
    note = (
        f"**Bold**: significant. In brackets: pairs of seeds, where they are fewer than n or {ENOUGH}; "
        f"below {ENOUGH} nothing is tested. SAM and MSAM are secondary."
    )
    header = ("setting", "baseline, %", *methods, "n")
    return Table(header, tuple(rows), notes=(note,)) if rows else None


def _gain(gain: Difference | None, n: int) -> str:
    if gain is None:
        return "–"
    significant = gain.n >= ENOUGH and gain.verdict in ("better", "worse")
    mean = f"**{signed(gain.mean)}**" if significant else signed(gain.mean)
    return mean if gain.n == n >= ENOUGH else f"{mean} ({gain.n})"


def paper_table(found: Sequence[Findings]) -> Table | None:
    """The paper's claims about accuracy, and how often these runs agree at default strengths."""
    rows = []
    for claim, pairs in CLAIMS.items():
        made = [each.difference for each in compared(found, pairs)]
        if made:
            verdicts = [each.verdict for each in made]
            counts = [verdicts.count(v) for v in ("better", "worse", "no difference seen")]
            means = [each.mean for each in made]
            span = f"{signed(min(means))} to {signed(max(means))}"
            rows.append((claim, _what(pairs), *map(str, counts), span))
    header = ("claim", "compared", "supported", "contradicted", "not significant", "means")
    return Table(header, tuple(rows)) if rows else None


def _what(pairs: Sequence[Pair]) -> str:
    """`ARWP − RWP, m-ARWP − m-RWP`"""
    if len(pairs) > 2:
        return "each − the one below it"
    names = [[each if ", " in each else label(parse(each)) for each in pair] for pair in pairs]
    return ", ".join(" − ".join(pair) for pair in names)


def result_table(findings: Findings, setting: Setting, part: Part) -> Table | None:
    """Accuracy, difference from the baseline, NLL, BatchNorm both ways, cost; None without runs."""
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
                *_cost(row, *bases),
                f"{len(finished)}" + (f" ({lost} diverged)" if lost else ""),
            )
        )
    header = (
        *("method", "strength", "accuracy %", f"− {setting.baseline} [interval]", "p (Holm)"),
        *("NLL", "accuracy %, BN recomputed", "time ×", "FLOPs ×", "n"),
    )
    twice = setting.reference("m-")
    notes = (f"Mixed methods: − {twice}.",) if twice != setting.baseline else ()
    return Table(header, tuple(rows), f"{setting.title}, {HOW[part]}", notes) if rows else None


def _mean(results: dict[int, Result], split: str) -> str:
    return mean_words([r.metrics[split][r.metric] for r in results.values() if split in r.metrics])


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
    for setting, part in itertools.product(findings.study.settings, JUDGED):
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


def minima_table(findings: Findings, setting: Setting, part: Part) -> Table | None:
    """All measures by method, mean ± standard deviation over seeds; None without any."""
    rows, failed = [], []
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
    if not rows:
        return None
    lines = findings.evidence.lines.values()
    how = next(line.minima for line in lines if "samples" in line.minima)
    notes = [
        f"On {how['samples']} un-augmented training images, the same for all; BatchNorm statistics "
        "recomputed on them wherever the weights are. Adaptive sharpness: the largest rise of the "
        f"loss within ‖eps / |w|‖ ≤ {how['sharpness_rho']:g}, parts of 128 images."
    ]
    if failed:
        notes.append(f"{len(failed)} models could not be measured; the first: {failed[0]}")
    title = f"Minima: {setting.title}, {HOW[part]}"
    return Table(("method", *MEASURES, "n"), tuple(rows), title, tuple(notes))
