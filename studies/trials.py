"""What the trials of the studies found, and whether it speaks for other defaults."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from steppe.lab.specs import Spec, label, parse
from steppe.lab.tables import Table, join_words
from studies.definitions import METHODS, Setting
from studies.findings import Findings
from studies.plan import pinned

NOTE = (
    "The strength that each method's trials chose on validation data, rho for SAM and MSAM and ratio for the "
    "others; in brackets the default where it is another, for plain training the recipe's weight decay. "
    "**Bold**: the default itself."
)


def trials_table(findings: Findings, setting: Setting) -> Table | None:
    """What the trials found for every strength, of the methods whose trials are done."""
    rows = []
    for method, choice in findings.plan.choices[setting.name].items():
        kind, best = _strength(choice.spec, setting)
        scores = {value: f"{value:g}: {_score(choice.scores[value])}" for value in choice.scores}
        scores[best] = f"**{scores[best]}**"
        found = ", ".join(scores[value] for value in sorted(scores))
        rows.append((setting.called(method), f"{kind} {found}", str(choice.trials)))
    if not rows or setting.tune is None:
        return None
    header = ("method", "strength: accuracy % on validation data, the chosen one in bold", "trials")
    title = f"Trials: {setting.title}, means over {setting.tune.seeds} seeds"
    return Table(header, tuple(rows), title)


def choices_table(found: Sequence[Findings]) -> Table | None:
    """The strengths that the trials chose beside the defaults, a row for each setting."""
    rows, moves = [], {method: list[int]() for method in METHODS[1:]}
    for findings, setting in _searched(found):
        chosen, cells = findings.plan.choices[setting.name], []
        for method in METHODS:
            if method not in chosen:
                cells.append("–")
                continue
            _, best = _strength(chosen[method].spec, setting)
            _, usual = _strength(pinned(setting, method), setting)
            if method in moves:
                moves[method].append((best > usual) - (best < usual))
            cells.append(f"**{best:g}**" if best == usual else f"{best:g} ({usual:g})")
        rows.append((f"`{findings.study.name}`: {setting.title}", *cells))
    if not rows:
        return None
    names = [label(parse(method), "sgd") for method in METHODS]
    header = ("chosen by trials (default)", f"{names[0]}: weight decay", *names[1:])
    return Table(header, tuple(rows), notes=(f"{NOTE} {_verdict(moves)}",))


def _verdict(moves: dict[str, list[int]]) -> str:
    """Which defaults lost to trials in one direction everywhere: those to change."""
    words = []
    for sign, way in ((1, "stronger"), (-1, "weaker")):
        lost = [
            label(parse(method), "sgd")
            for method, signs in moves.items()
            if signs and all(each == sign for each in signs)
        ]
        words.append(f"{way} than the default everywhere: {join_words(lost or ['none'])}")
    return f"Chosen {'; '.join(words)}."


def _searched(found: Sequence[Findings]) -> Iterator[tuple[Findings, Setting]]:
    for findings in found:
        for setting in findings.study.settings:
            if findings.plan.choices[setting.name]:
                yield findings, setting


def _strength(spec: Spec, setting: Setting) -> tuple[str, float]:
    """The kind of a spec's strength and its value; of plain training the weight decay."""
    if spec.strength is not None:
        return spec.strength
    decay = spec.fields.get("weight_decay", setting.config.weight_decay)
    assert isinstance(decay, int | float)
    return "weight decay", float(decay)


def _score(score: float) -> str:
    return f"{score:.1f}" if math.isfinite(score) else "diverged"
