"""`docs/evidence.md` and a page for each study: what the lines say, with nothing typed by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from steppe.lab.tables import Table, join_words
from steppe.report.canvas import save_figure
from studies import finetune
from studies.comparisons import refuted
from studies.confirmation import power_table, verdict_table, verdict_words
from studies.definitions import STUDIES, Study
from studies.evidence import Evidence, Line
from studies.findings import JUDGED, Findings
from studies.flatness import CAPTION, TITLE, correlations, flatness_figure, flatness_words
from studies.questions import NOTHING, PRIMARY, post_hoc
from studies.tables import gains_table, minima_table, pairs_table, paper_table, result_table

Draw = Callable[[], Figure]
OPENING = """# Evidence

What the methods gain on real data, at a size that two CPU cores train. Five questions are primary;
everything else is secondary. `python -m studies --page` writes this page from the lines in `evidence/`,
one for each run, with its config, environment and commit. These are not the paper's settings;
[its numbers](reproducing.md) are on another page.
"""
READING = """## How to read it

Every method starts from the baseline's initial weights and sees its batches in its order; the mixed
methods (m-RWP, m-ARWP) see a second batch, and are compared with the baseline on both in the
confirmation of the defaults. Differences are paired by seed and have t-intervals at the
level of Holm's test, which corrects over all primary comparisons of a study, and over its secondary
ones apart. Below five seeds nothing is tested. Accuracy is that of the final model on test data;
hyperparameters were chosen on validation data. [How the runs are made](studies.md#how-runs-are-compared).
"""
PAPER = """## Against the paper

Secondary. How often a claim of the paper is significantly supported or contradicted here, at default
strengths.
"""
SECONDARY = """Everything on this page is secondary, except the gains of RWP, ARWP, m-RWP and m-ARWP at default
strengths and m-ARWP − SAM, which answer the primary questions on the page [Evidence](../evidence.md).
[How the runs are made and compared](../studies.md#how-runs-are-compared).
"""


def compose(
    evidence: Path, studies: Sequence[Study] | None = None
) -> tuple[dict[str, str], dict[str, Draw]]:
    """By file name in `docs` the text of the pages, and what draws the pictures in them."""
    studies = tuple(STUDIES.values()) if studies is None else studies
    found = [Findings(study, Evidence(evidence, study.name)) for study in studies]
    verdict, sections, drawn = [], [], dict[str, Draw]()
    for number, question in enumerate(PRIMARY, 1):
        answer = question.answer(found)
        verdict.append(f"{number}. **{question.text}** {answer}")
        sections += [f"## {number}. {question.text}", ""]
        if answer == NOTHING:
            sections += [NOTHING, ""]
            continue
        file = f"evidence/{question.name}.png"
        drawn[file] = partial(question.figure, found)
        sections += [_framed(file, question.caption), "", *_written(question.table(found))]
    if made := correlations(found):
        file = "evidence/flatness.png"
        drawn[file] = partial(flatness_figure, made)
        sections += [f"## {TITLE}", "", f"Secondary. {flatness_words(made)}", ""]
        sections += [_framed(file, CAPTION), ""]
    parts = [OPENING, "## Verdict", "", *verdict, "", *post_hoc(found)]
    parts += [f"{sentence}\n" for sentence in verdict_words(found)]
    parts += [f"{sentence}\n" for sentence in refuted(evidence)]
    parts += [
        *sections,
        PAPER,
        *_written(paper_table(found)),
        "## Studies",
        "",
        _overview(found),
        "",
    ]
    tuned = finetune.page(evidence)
    parts += ["[Fine-tuning](evidence/finetune.md): a pretrained MiniLM.", ""] if tuned else []
    parts += [*_folded("All gains at default strengths", gains_table(found)), READING]
    pages = {"evidence.md": "\n".join(parts)} | ({"evidence/finetune.md": tuned} if tuned else {})
    for findings in found:
        if findings.evidence.lines:
            pages[f"evidence/{findings.study.name}.md"] = study_page(findings)
    return pages, drawn


def write_page(evidence: Path, docs: Path, studies: Sequence[Study] | None = None) -> list[Path]:
    """Write the pages and their figures into `docs`, and give the files."""
    pages, drawn = compose(evidence, studies)
    folder = docs / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.png"), *folder.glob("*.md")]:
        old.unlink()
    for name, text in pages.items():
        (docs / name).write_text(text, encoding="utf-8")
    files = [
        file for name, draw in drawn.items() for file in save_figure(draw(), docs / name, ("png",))
    ]
    return [*(docs / name for name in pages), *files]


def _framed(file: str, caption: str) -> str:
    return f"![{Path(file).stem}]({file})\n\n*{caption}*"


def _written(table: Table | None) -> list[str]:
    return [] if table is None else [table.markdown(), ""]


def _folded(title: str, table: Table | None) -> list[str]:
    if table is None:
        return []
    head = f'<details markdown="1"><summary>{title}</summary>'
    return [head, "", table.markdown(), "", "</details>", ""]


def _overview(found: list[Findings]) -> str:
    """What has been trained, and what it cost."""
    rows = []
    for findings in found:
        study, lines = findings.study, findings.evidence.lines
        runs = {entry.run for entry in findings.plan.entries}
        open_runs = {entry.run for entry in findings.plan.missing(findings.evidence)}
        done, total = len(runs - open_runs), len(runs) + len(findings.plan.waiting)
        hours = sum(line.result.cpu_seconds for line in lines.values()) / 3600
        title = f"[{study.title}](evidence/{study.name}.md)" if lines else study.title
        settings = "; ".join(setting.title for setting in study.settings)
        rows.append((title, settings, f"{done} of {total}", f"{hours:.1f}"))
    return Table(("study", "settings", "runs", "processor hours"), tuple(rows)).markdown()


def study_page(findings: Findings) -> str:
    """One study: its tables, and where it ran."""
    study = findings.study
    parts = [f"# {study.title}", ""]
    parts += [*_written(power_table(findings)), *_written(verdict_table(findings))]
    parts += [SECONDARY, *_unused(findings), *(f"{words}\n" for words in study.cut)]
    parts += _written(pairs_table(findings))
    for setting in study.settings:
        for part, table in itertools.product(JUDGED, (result_table, minima_table)):
            parts += _written(table(findings, setting, part))
    return "\n".join([*parts, _where(list(findings.evidence.lines.values())), ""])


def _where(lines: list[Line]) -> str:
    """The machines, versions and commits that the lines come from."""

    def counted(name: str) -> str:
        found = (line.result.environment.get(name) for line in lines)
        values = Counter("not recorded" if value is None else str(value) for value in found)
        if len(values) == 1:
            return next(iter(values))
        return join_words([f"{value} ({count} runs)" for value, count in values.most_common()])

    return (
        f"{len(lines)} runs, one thread each, on {counted('processor')} ({counted('cores')} cores), "
        f"instruction set {counted('simd')}, Python {counted('python')}, torch {counted('torch')}, "
        f"steppe {counted('steppe')}, commit {counted('commit')}."
    )


def _unused(findings: Findings) -> list[str]:
    """How many lines are no longer part of the plan."""
    unused = findings.evidence.lines.keys() - {entry.run for entry in findings.plan.entries}
    words = (
        f"{len(unused)} lines belong to no run of the study as it is defined now, and are not shown "
        "(`python -m studies --archive NAME` sets them aside)."
    )
    return [words, ""] if unused else []
