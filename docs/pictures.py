"""The pictures of the README and of *Why flat minima*, from the runs of `make demo`.

make demo && .venv/bin/python docs/pictures.py
"""

from pathlib import Path

import torch

from steppe.lab.sentences import NAMES
from steppe.report.canvas import COLOURS, panels, save_figure
from steppe.report.figures import landscape_figure, radius_figure
from steppe.report.gathered import Gathered
from steppe.report.sections import interval
from steppe.report.subjects import find_comparison
from steppe.report.survival import survival_curves

STORE = Path("runs/demo")
ASSETS = Path(__file__).parent / "assets"
SHOWN = ("SGD", "SAM", "RWP", "m-RWP")


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
        (curves, *_) = survival_curves(list(robust[index].values())).values()
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


def main() -> None:
    gathered = Gathered(find_comparison([str(STORE / "noisy.json")], STORE), store=STORE)
    labels = [row.label for row in gathered.rows]
    save_figure(result_picture(gathered), ASSETS / "result", formats=("png",))
    for kind, draw in (("landscape", landscape_figure), ("radius", radius_figure)):
        found = {labels[i]: result for i, result in gathered.results(kind).items()}
        figure = draw({name: found[name] for name in SHOWN[::2]})
        save_figure(figure, ASSETS / kind, formats=("png",))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
