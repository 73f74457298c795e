"""Pictures and tables of README and docs: from the lines in `evidence/`, and from `make demo` where it has run.

`python -m docs.pictures` writes them; `make pictures` runs the demo first.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from steppe.lab.cost import costs
from steppe.lab.sentences import comparison_sentence
from steppe.lab.statistics import mean_std, mean_words
from steppe.lab.tables import Table, signed
from steppe.report.canvas import COLOURS, save_figure
from steppe.report.figures import landscape_figure, radius_figure
from steppe.report.gathered import Gathered
from steppe.report.subjects import find_comparison
from studies import finetune
from studies.definitions import LARGE, METHODS, study
from studies.evidence import Evidence, Line
from studies.findings import CHANGES, UNCHANGED, Claim, Findings, Row

STORE = Path("runs/demo")
ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "docs/assets"
SETTING = "resnet-clean"
SHOWN = ("SGD", "SAM", "RWP", "RWP (rise 0.2)")
LABELS = {"RWP": "RWP (default)"}
HARDEST = CHANGES[-1]
AFTER = (UNCHANGED, "3 bits", HARDEST)
Blocks = Mapping[str, str]
"""Markdown by the name of its place."""


def digits() -> Findings:
    return Findings(study("digits"), Evidence(ROOT / "evidence", "digits"))


def measured(found: Findings, setting: str, method: str) -> Row:
    """The runs of a method whose models were compressed."""
    row = found.row(setting, "defaults", method)
    kept = {seed: row.lines[seed] for seed in row.scores(HARDEST)}
    return Row(row.part, row.name, kept)


def time_of(row: Row, base: Row) -> float:
    """Training time in multiples of the baseline's."""
    seeds = sorted(row.lines.keys() & base.lines.keys())
    return costs(*([each.lines[seed].result for seed in seeds] for each in (row, base)))["time"]


def compression_picture(found: Findings) -> Figure:
    """What pruning leaves of the accuracy, and what training took."""
    figure = Figure(figsize=(9.6, 3.7), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.7, 1))
    rows = [measured(found, SETTING, name) for name in SHOWN]
    ranked = sorted(range(len(rows)), key=lambda i: rows[i].mean(HARDEST))
    lowest = 0.0
    for place, i in enumerate(ranked):
        row, name = rows[i], LABELS.get(SHOWN[i], SHOWN[i])
        style = {"color": COLOURS[i], "linewidth": 3 if i == len(rows) - 1 else 1.8}
        means = [row.mean(after) for after in (UNCHANGED, "50 % pruned", HARDEST)]
        left.plot([0, 50, 80], means, marker="osD^"[i], **style)
        seeds = list(row.scores(HARDEST).values())
        left.scatter([80] * len(seeds), seeds, s=12, color=COLOURS[i], alpha=0.35, linewidth=0)
        lowest = max(means[-1], lowest + 2.2)  # names keep clear of each other
        left.text(
            82, lowest, f"{means[-1]:.0f} %  {name}", color=COLOURS[i], va="center", weight="bold"
        )
        time = time_of(row, rows[0])
        right.barh(place, time, color=COLOURS[i])
        right.text(time + 0.03, place, f"{time:.1f} ×", va="center")
    left.set(title="What pruning leaves of a small ResNet", ylabel="test accuracy, %")
    left.set_xlabel(
        f"smallest weights removed, %   (mean of {len(rows[0].lines)} seeds; pale: each seed)"
    )
    left.set_xticks([0, 50, 80])
    left.set_xlim(-3, 122)
    right.set(title="Training time", xlabel="× SGD", xlim=(0, 2.6))
    right.set_yticks(range(len(ranked)), [LABELS.get(SHOWN[i], SHOWN[i]) for i in ranked])
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, axis="y" if axis is left else "x")
    return figure


def result_table(found: Findings) -> str:
    """The README's: accuracy as trained and compressed, the gain after the hardest change, time."""
    base, *others = (measured(found, SETTING, name) for name in SHOWN)
    rows = []
    for row in (base, *others):
        cells = [mean_words(list(row.scores(after).values()), ".1f", ".1f") for after in AFTER]
        name = LABELS.get(row.name, row.name)
        gain = "" if row is base else signed(mean_std(pairs(found, row.name))[0], 1)
        rows.append((name, *cells, gain, f"{time_of(row, base):.2f}"))
    header = ("", *(f"{after}, %".replace(UNCHANGED, "as trained") for after in AFTER))
    table = Table((*header, "gain, 80 % pruned", "time ×"), tuple(rows))
    return f"{table.markdown()}\n\n{verdict(found)}"


def pairs(found: Findings, name: str) -> list[float]:
    return found.pairs(Claim(SETTING, "defaults", name, SHOWN[0], HARDEST))


def verdict(found: Findings) -> str:
    """Whether the gain is significant, and over how many comparisons that was corrected."""
    gain = found.differences[Claim(SETTING, "defaults", SHOWN[-1], SHOWN[0], HARDEST)]
    words = "significant" if gain.verdict in ("better", "worse") else "not significant"
    where = next(iter(measured(found, SETTING, SHOWN[0]).lines.values())).result.environment
    return (
        f"n = {gain.n}, ± standard deviation. {SHOWN[-1]}, 80 % pruned: 95 % interval of the gain "
        f"[{signed(gain.low95, 1)}, {signed(gain.high95, 1)}]; {words} after correction over all comparisons "
        f"of the study. torch {where['torch']}, {where['processor']}, one thread."
    )


def survival_block(found: Findings, setting: str) -> str:
    """All methods after every change, for the page on compression: BatchNorm recalibrated, and as stored."""
    here = next(each for each in found.study.settings if each.name == setting)
    names = [here.called(method) for method in (*METHODS, *LARGE)]
    known = [row for name in names if (row := measured(found, setting, name)).lines]
    counts = sorted({len(row.lines) for row in known})
    parts = [f"n = {' to '.join(map(str, counts))}:", survival_table(known)]
    if any("as is" in robust(line) for line in known[0].lines.values()):
        parts += ["The same with the BatchNorm statistics that training left:"]
        parts += [survival_table(known, "as is")]
    return "\n\n".join(parts)


def survival_table(rows: list[Row], way: str = "") -> str:
    """Mean accuracy after each change, with recalibrated statistics or those of this name."""
    cells = []
    for row in rows:
        found = [robust(line) for line in row.lines.values()]
        measured = [each[way] if way else each for each in found]
        means = [mean_std([each[after] for each in measured])[0] for after in (UNCHANGED, *CHANGES)]
        cells.append((row.name, *(f"{mean:.1f}" for mean in means)))
    return Table(("", "unchanged", *CHANGES), tuple(cells)).markdown()


def robust(line: Line) -> dict[str, Any]:
    return line.minima["robustness"]


def finetune_block() -> str:
    """The fine-tuning study's tables with clean labels, of the smaller training set."""
    made = finetune.tables(ROOT / "evidence")
    clean = [
        title for title in made if "clean" in title and title.startswith(f"{finetune.SIZES[0]} ")
    ]
    return "\n\n".join(f"**{title}**\n\n{made[title]}" for title in clean)


def evidence_blocks(found: Findings) -> dict[str, Blocks]:
    """By file what the lines of the digits study, and of the fine-tuning study, say in it."""
    settings = (SETTING, "mlp-noisy")
    return {
        "README.md": {"result": result_table(found)},
        "docs/compression.md": {name: survival_block(found, name) for name in settings},
        "docs/finetuning.md": {"study": finetune_block()},
    }


def output(gathered: Gathered) -> str:
    """What `make demo` prints first, shortened."""
    comparison = gathered.comparison
    printed = comparison.table(width=80).partition("\n\n")[2].partition("\n\n")[0]
    wrapped = "\n".join(textwrap.wrap(comparison_sentence(comparison), 80))
    return f"```\n{printed}\n…\n{wrapped}\n```"


def put(file: Path, blocks: Blocks) -> None:
    """Write each block where its comment stands."""
    content = file.read_text(encoding="utf-8")
    for name, block in blocks.items():
        begin, end = f"<!-- {name}: written by docs/pictures.py -->\n", "<!-- end -->"
        before, _, rest = content.partition(begin)
        content = f"{before}{begin}\n{block}\n\n{end}{rest.partition(end)[2]}"
    file.write_text(content, encoding="utf-8")


def demo_pictures(gathered: Gathered) -> None:
    put(ROOT / "README.md", {"output": output(gathered)})
    labels = [row.label for row in gathered.rows]
    for kind, draw in (("landscape", landscape_figure), ("radius", radius_figure)):
        found = {labels[i]: result for i, result in gathered.results(kind).items()}
        figure = draw({name: found[name] for name in (SHOWN[0], SHOWN[-1])})
        save_figure(figure, ASSETS / kind, formats=("png",))


def main() -> None:
    found = digits()
    for name, blocks in evidence_blocks(found).items():
        put(ROOT / name, blocks)
    save_figure(compression_picture(found), ASSETS / "result", formats=("png",))
    if (STORE / "noisy.json").exists():
        demo_pictures(Gathered(find_comparison([str(STORE / "noisy.json")], STORE), store=STORE))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
