"""`docs/evidence.md`: what the lines of evidence say, with nothing typed by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

from steppe.lab.tables import join_words
from steppe.report.canvas import save_figure
from studies.answers import answers
from studies.definitions import STUDIES, Study
from studies.evidence import Evidence, Line
from studies.findings import JUDGED, Findings
from studies.flatness import minima_table
from studies.gains import gains_table
from studies.pictures import Picture, pictures
from studies.plan import PARTS
from studies.summary import summary_table
from studies.tables import result_table
from studies.trials import choices_table, trials_table

COMMAND = "python -m studies --page"
OPENING = f"""# Evidence

What the methods gain on real data, at a size that two CPU cores carry. This page and its figures are
written by `{COMMAND}` from the lines in `evidence/`, one for each finished run, with its config,
environment and commit; `python -m studies NAME` trains what is missing. Nothing is typed by hand. These
are not the paper's settings, and none of its numbers stand here: those are on
[Reproducing the paper](reproducing.md).
"""
READING = """## How to read it

- Accuracy is that of the final model on the test data: mean ± standard deviation over seeds. Test data
  chose nothing.
- Runs are paired by seed: the same initial weights, and the clean pass of an m-method sees SGD's batches
  in SGD's order. Differences have t-intervals over the pairs at the level of Holm's test, which corrects
  over all comparisons of a study, those of the answers included. Below five seeds there is no verdict,
  but the smallest difference that could have been seen.
- Default strengths are the library's, untuned. Tuned ones are the best of five log-spaced values (for
  SGD, of weight decay) by accuracy on a fifth of the training data, noisy labels left in, over two seeds
  that are not reported; a winner at the grid's edge extends the grid once. The methods keep the recipe's
  weight decay. The runs shown were then trained on all training data. *Trials* counts the runs spent on
  that; a control takes its method's strength.
- m-methods see two batches a step. *Batch doubled* gives a one-pass method as much data in as many steps,
  *steps doubled* as many FLOPs. *SAM, two batches* takes its two gradients from different batches,
  *m-ARWP, one batch* from the same.
- *BN recomputed*: accuracy after BatchNorm's statistics were computed anew at the final weights. Time is
  processor time of the training steps on one thread, median of the pairs that ran on equal machines (with
  plain training at the recipe's weight decay where the tuned one ran on another); FLOPs are counted.
- The last bits of a run, and in the end its model, depend on the processor's instruction set, which can be
  [chosen](lab.md#runs) to repeat a line. `python -m studies NAME --evidence elsewhere` trains lines again.
"""
STATE = "What has been trained so far:"


def compose(
    evidence: Path, studies: tuple[Study, ...] = tuple(STUDIES.values())
) -> tuple[str, dict[str, Picture]]:
    """The text of the page, and by file name the pictures in it."""
    found = [Findings(study, Evidence(evidence, study.name)) for study in studies]
    parts = [OPENING, _overview(found), READING]
    shown: dict[str, Picture] = {}
    for findings in found:
        made = {f"{findings.study.name}-{name}.png": p for name, p in pictures(findings).items()}
        first, *rest = [_framed(file, picture) for file, picture in made.items()] or [""]
        parts += [section(findings, first), *rest]
        shown |= made
    return "\n".join(parts), shown


def write_page(
    evidence: Path, docs: Path, studies: tuple[Study, ...] = tuple(STUDIES.values())
) -> list[Path]:
    """Write evidence.md and its figures into `docs`, and give the files."""
    text, shown = compose(evidence, studies)
    folder = docs / "evidence"
    for old in folder.glob("*.png"):
        old.unlink()
    drawn = [file for name, p in shown.items() for file in _draw(p, folder / name)]
    page = docs / "evidence.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return [page, *drawn]


def _draw(picture: Picture, file: Path) -> list[Path]:
    return save_figure(picture.draw(), file, ("png",))


def _overview(found: list[Findings]) -> str:
    rows = []
    for findings in found:
        plan, evidence = findings.plan, findings.evidence
        runs = {entry.run for entry in plan.entries}
        done = len(runs & evidence.lines.keys())
        total = len(runs) + len(plan.waiting)
        state = "complete" if done == total else "nothing yet" if not done else "in part"
        settings = "; ".join(setting.title for setting in findings.study.settings)
        rows.append(f"- `{findings.study.name}`: {done} of {total} runs, {state}. {settings}.")
    made = (gains_table(found), summary_table(found), choices_table(found))
    tables = [table for table in made if table is not None]
    head = ["## In short", ""] if tables else []
    return "\n".join([*head, *(f"{table.markdown()}\n" for table in tables), STATE, "", *rows, ""])


def _framed(file: str, picture: Picture) -> str:
    return f"![{file}](evidence/{file})\n\n*{picture.caption}*\n"


def section(findings: Findings, opening: str) -> str:
    """One study: what is missing, the opening picture, the answers, the tables."""
    study, lines = findings.study, list(findings.evidence.lines.values())
    parts = [f"## {study.title}", ""]
    if not lines:
        return "\n".join([*parts, f"No runs yet: `python -m studies {study.name}`.", ""])
    parts += [_where(lines), "", *_lacks(findings), *(f"{words}\n" for words in study.cut)]
    parts += [opening, *answers(findings)]
    for setting in study.settings:
        made = [
            table(findings, setting, part)
            for part, table in itertools.product(JUDGED, (result_table, minima_table))
        ]
        made.append(trials_table(findings, setting))
        parts += [f"{table.markdown()}\n" for table in made if table is not None]
    return "\n".join(parts)


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


def _lacks(findings: Findings) -> list[str]:
    """What of the plan has no line yet, and what lines are no longer part of it."""
    plan, evidence = findings.plan, findings.evidence
    absent = Counter((e.setting.name, e.part) for e in [*plan.missing(evidence), *plan.waiting])
    words = []
    for setting in findings.study.settings:
        parts = [
            f"{part} {absent[setting.name, part]}" for part in PARTS if absent[setting.name, part]
        ]
        if parts:
            words.append(f"{setting.name} ({join_words(parts)})")
    found = [f"Still missing, in runs: {'; '.join(words)}.", ""] if words else []
    known = {entry.run for entry in plan.entries}
    strange = [line for line in evidence.lines.values() if line.run not in known]
    if strange:
        found += [
            f"{len(strange)} lines belong to no run of the study as it is defined now, and are not "
            "shown.",
            "",
        ]
    return found
