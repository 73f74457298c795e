"""What README and docs show of `make demo`: pictures, and the tables of the README.

Run by `make pictures`.
"""

import textwrap
from pathlib import Path

import torch

from steppe.lab.sentences import NAMES, comparison_sentence, interval_words
from steppe.lab.statistics import mean_std
from steppe.lab.survival import survival_cells
from steppe.report.canvas import COLOURS, panels, save_figure
from steppe.report.figures import landscape_figure, radius_figure
from steppe.report.gathered import Gathered
from steppe.report.sections import interval
from steppe.report.subjects import find_comparison
from steppe.report.summary import notices
from steppe.report.survival import survival_curves

STORE = Path("runs/demo")
ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "docs/assets"
SHOWN = ("SGD", "SAM", "RWP (rise 0.02)", "RWP (rise 0.2)")


def style(name: str) -> dict:
    number = SHOWN.index(name)
    return {"color": COLOURS[number], "marker": "osD^"[number], "markersize": 5, "label": name}


def result_picture(gathered: Gathered):
    """Accuracy and cost; the loss along a line through the minimum; what is left after rounding."""
    figure, (left, middle, right) = panels(3, width=3.5, height=3.0)
    rows = {row.label: (index, row) for index, row in enumerate(gathered.rows)}
    landscapes, robust = gathered.results("landscape"), gathered.every("robustness")
    metric = gathered.comparison.example.metric
    for name in SHOWN:
        index, row = rows[name]
        _, mean, high = interval(row, metric)
        left.errorbar(row.cost["time"], mean, yerr=high - mean, capsize=3, **style(name))
        left.annotate(name, (row.cost["time"], mean), (8, -3), textcoords="offset points")
        plane = landscapes[index]
        loss = plane.loss[:, int(plane.b.abs().argmin())]
        middle.plot(plane.a, loss, color=style(name)["color"], linewidth=2, label=name)
        (curves, *_) = survival_curves(robust[index]).values()
        panel = next(panel for panel in curves if panel.startswith("bits"))
        bits, accuracy, bars = zip(*[p for p in curves[panel] if p[0] <= 8], strict=True)
        right.errorbar(bits, accuracy, yerr=bars, capsize=3, linewidth=2, **style(name))
    left.set(title="Accuracy and time", xlabel="training time, multiples of SGD")
    left.set(ylabel=f"test {NAMES[metric]}")
    left.margins(x=0.4)
    middle.set(title="Loss around the minimum", xlabel="distance along a random direction")
    middle.set(ylabel="training loss")
    right.set(title="Weights rounded", xlabel="bits of a weight", ylabel="test accuracy %")
    right.invert_xaxis()
    right.legend(frameon=False)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure


def tables(gathered: Gathered) -> dict[str, str]:
    """Markdown by the name of its place."""
    comparison = gathered.comparison
    sentence = comparison_sentence(comparison)
    worse = [f"{words} " for words in notices(gathered) if words.startswith("Calibration")]
    left = {(c.row.spec, c.change.partition(",")[0]): c.values for c in survival_cells(comparison)}
    result = []
    for row in (row for row in gathered.rows if row.label in SHOWN):
        mean, std = mean_std(row.values("test", "accuracy"))
        three, pruned = (
            mean_std(left[row.spec, change])[0] for change in ("3 bits", "80 % pruned")
        )
        gain = interval_words(row.difference, 2).replace("–", "")
        ece = mean_std(row.values("test", "ece"))[0]
        time = row.cost["time"]
        cells = (
            f"{mean:.2f} ± {std:.2f} | {gain} | {time:.2f} | {three:.1f} | {pruned:.1f} | {ece:.1f}"
        )
        result.append(f"| {row.label} | {cells} |")
    where = comparison.example.environment
    machine = f"torch {where['torch']}, {where['processor']}, one thread per run."
    printed = comparison.table(width=80).partition("\n\n")[2].partition("\n\n")[0]
    wrapped = "\n".join(textwrap.wrap(sentence, 80))
    return {
        "result": "\n".join([
            "| | accuracy, % | gain over SGD [95 % interval, Holm] | time × | 3 bits, % | 80 % pruned, % | ECE, % |",
            "|---|---:|---:|---:|---:|---:|---:|", *result, "", f"{''.join(worse)}{machine}",
        ]),
        "output": f"```\n{printed}\n…\n{wrapped}\n```",
    }  # fmt: skip


def write(gathered: Gathered) -> None:
    """Put each table where its comment stands."""
    file = ROOT / "README.md"
    content = file.read_text(encoding="utf-8")
    for name, table in tables(gathered).items():
        begin, end = f"<!-- {name}: written by docs/pictures.py -->\n", "<!-- end -->"
        before, _, rest = content.partition(begin)
        content = f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    file.write_text(content, encoding="utf-8")


def main() -> None:
    gathered = Gathered(find_comparison([str(STORE / "noisy.json")], STORE), store=STORE)
    write(gathered)
    labels = [row.label for row in gathered.rows]
    save_figure(result_picture(gathered), ASSETS / "result", formats=("png",))
    for kind, draw in (("landscape", landscape_figure), ("radius", radius_figure)):
        found = {labels[i]: result for i, result in gathered.results(kind).items()}
        figure = draw({name: found[name] for name in (SHOWN[0], SHOWN[-1])})
        save_figure(figure, ASSETS / kind, formats=("png",))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
