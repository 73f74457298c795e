"""The tables of the page: one for each setting and kind of strengths."""

from __future__ import annotations

import math

from steppe.lab.comparison import costs
from steppe.lab.results import Result
from steppe.lab.sentences import interval_words, p_words
from steppe.lab.specs import parse
from steppe.lab.statistics import mean_std, mean_words
from steppe.lab.tables import Table
from studies.definitions import Setting
from studies.findings import HOW, Claim, Findings
from studies.plan import Part


def result_table(findings: Findings, setting: Setting, part: Part) -> Table | None:
    """Accuracy, difference to plain training, NLL, BatchNorm both ways, cost; None without runs."""
    names, base = findings.names(setting, part), setting.plain
    if not names:
        return None
    normed = any(
        "test_recomputed" in result.metrics
        for name in names
        for result in findings.finished(setting, part, name).values()
    )
    header = (
        *("method", "strength", "accuracy %", f"− {base} [interval]", "p (Holm)", "NLL"),
        *(("accuracy %, BN recomputed",) if normed else ()),
        *(("trials",) if part == "tuned" else ()),
        *("time ×", "FLOPs ×", "n"),
    )
    rows = []
    for name in names:
        finished = findings.finished(setting, part, name)
        lost = len(findings.lines(setting, part, name)) - len(finished)
        told = findings.differences.get(Claim(setting.name, part, name, base))
        rows.append(
            (
                name,
                strength_words(findings, setting, part, name),
                _mean(finished, "test") if finished else "diverged",
                interval_words(told, 2),
                "–" if told is None else p_words(told),
                _nll(finished),
                *((_mean(finished, "test_recomputed"),) if normed else ()),
                *((_trials(findings, setting, name),) if part == "tuned" else ()),
                *_cost(findings, setting, part, name, base),
                f"{len(finished)}" + (f" ({lost} diverged)" if lost else ""),
            )
        )
    title = f"{setting.title}, {HOW[part]}"
    return Table(header, tuple(rows), title)


def strength_words(findings: Findings, setting: Setting, part: Part, name: str) -> str:
    """`ratio 0.6`; for tuned plain training its weight decay."""
    line = next(iter(findings.lines(setting, part, name).values()), None)
    if line is None:
        return "–"
    config = line.result.config
    used = parse(config.method).strength
    if used is not None:
        return f"{used[0]} {used[1]:g}"
    return f"weight decay {config.weight_decay:g}" if part == "tuned" else "–"


def _mean(results: dict[int, Result], split: str) -> str:
    return mean_words([r.metrics[split][r.metric] for r in results.values() if split in r.metrics])


def _nll(results: dict[int, Result]) -> str:
    mean, _ = mean_std([result.metrics["test"]["nll"] for result in results.values()])
    return "–" if math.isnan(mean) else f"{mean:.3f}"


def _trials(findings: Findings, setting: Setting, name: str) -> str:
    """Runs spent on a method's strength; a control takes its method's, and spends none."""
    methods = {setting.called(method): method for method in setting.methods}
    choice = findings.plan.choices.get(setting.name, {}).get(methods.get(name, ""))
    return "–" if choice is None else str(choice.trials)


def _cost(
    findings: Findings, setting: Setting, part: Part, name: str, base: str
) -> tuple[str, str]:
    """Time and FLOPs as multiples of plain training's.

    Where none of the pairs ran on one machine, time is against plain training with the recipe's weight
    decay, on which it does not depend.
    """
    own = findings.lines(setting, part, name)
    found: dict[str, float] = {}
    for where in dict.fromkeys((part, "defaults")):
        plain = findings.lines(setting, where, base)
        seeds = sorted(own.keys() & plain.keys())
        if seeds and "time" not in found:
            found |= costs([own[s].result for s in seeds], [plain[s].result for s in seeds])
    time, flops = (f"{found[kind]:.2f}" if kind in found else "–" for kind in ("time", "flops"))
    return time, flops
