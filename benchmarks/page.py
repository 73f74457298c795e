"""Write docs/performance.md and its figure from the published results.

    python benchmarks/page.py [--check]

Nothing on that page is typed by hand; `--check` fails if it is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steppe.lab.tables import Table

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURE = DOCS / "performance.md", DOCS / "performance-scaling.png"
Result = dict[str, Any]
NETS = {"resnet18": "ResNet-18, CIFAR form", "vit": "ViT-S", "mlp": "MLP 64-128-128-10"}

HEAD = """\
<!-- written by benchmarks/page.py from benchmarks/results: do not edit -->
# Performance

What a step costs. Every number is a ratio or a median from one run in which all contenders take turns;
quartiles are in brackets. Timings are published only from a machine that was idle before the run. Everything was
measured on the CPU; on a GPU the same code issues the same few batched operations without waiting for the
device, but none of it was run there. `make bench` repeats everything and writes this page again.
[Parallel passes](parallel.md#what-a-step-takes) has the times of two processes, [Analysis](analysis.md#what-it-costs)
those of analyses.
"""


def table(columns: Mapping[str, Mapping[str, str]], first: str = "") -> str:
    """A row for each name that a column has; cells that are missing stay empty."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [(name, *(column.get(name, "") for column in columns.values())) for name in names]
    return Table((first, *columns), tuple(rows)).markdown() + "\n"


def span(s: Mapping[str, float], digits: int = 2, by: float = 1.0) -> str:
    median, low, high = (f"{s[key] / by:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} [{low}, {high}]"


def spans(found: Mapping[str, Any], digits: int = 2, by: float = 1.0) -> dict[str, str]:
    """By name median and quartiles, without what is no longer measured."""
    return {name: span(s, digits, by) for name, s in found.items() if "released" not in name}


def judged(value: float, bar: float | None) -> str:
    if bar is None:
        return f"{value:.2f}"
    return f"{value:.2f} ({'meets' if value <= bar else 'misses'} {bar:g})"


def step(result: Result) -> list[str]:
    parts = [
        "Whole steps vary by more than a one-pass method adds, so what it adds (moving the weights, putting them "
        "back, learning from gradients) is also measured alone.\n"
    ]
    if any("rise" in name for found in result["nets"].values() for name in found["added"]):
        parts += [
            "With a rise, whole steps are the first ones, which are all measured; what is added is the mean over "
            "eight later steps, of which two are measured and, under BatchNorm, one rests.\n"
        ]
    for net, found in result["nets"].items():
        steps, added = found["steps"], found["added"]
        sgd = steps["SGD"]["median"]
        columns = {
            "× an SGD step": spans(steps, 3, sgd),
            "adds, ms": spans(added),
            "adds, × an SGD step": spans(added, 3, sgd),
        }
        parts += [
            f"**{NETS[net]}**, {found['parameters']:,} parameters, batch {found['batch']}, n = "
            f"{steps['SGD']['n']} steps each, an SGD step takes {span(steps['SGD'], 1)} ms:\n",
            table(columns),
        ]
    return parts


def launches(result: Result) -> list[str]:
    counts, nets = result["counts"], next(iter(result["counts"].values()))
    columns = {net: {name: f"{each[net]:.3g}" for name, each in counts.items()} for net in nets}
    for net, found in result.get("times", {}).items():
        sgd, bars = found["SGD"]["median"], result["time_bars"][net]
        columns[f"time, {net}"] = {
            name: judged(found[name]["median"] / sgd, bars.get(name)) for name in counts
        }
    return [
        "Operations for each perturbed pass beyond forwards, backwards and the optimizer's step, counted on "
        "the `meta` device with a GPU's block sizes. They do not grow with depth. The bars are "
        f"{result['bars']['transformer']} for a transformer and {result['bars']['resnet18']} for ResNet-18. "
        "*Time*: whole steps where operations are all there is, on one thread, as multiples of SGD's.\n",
        table(columns),
    ]


def scaling(result: Result) -> list[str]:
    parts = ["Milliseconds that are added to a step:\n"]
    for what, first in (("weights", "weights"), ("tensors", "tensors, of a million weights")):
        rows = {f"{int(count):,}": spans(found, 3) for count, found in result[what].items()}
        names = next(iter(rows.values()))
        parts.append(table({n: {row: rows[row][n] for row in rows} for n in names}, first))
    return [*parts, f"![Cost against the number of weights and of tensors]({FIGURE.name})\n"]


def memory(result: Result) -> list[str]:
    found = {n: copies for n, copies in result["copies"].items() if "released" not in n}
    cells = {name: judged(copies, result["bars"].get(name)) for name, copies in found.items()}
    return [
        f"Peak memory over SGD's, in copies of {result['parameters']:,} parameters:\n",
        table({"copies": cells}),
    ]


def lora(result: Result) -> list[str]:
    columns = {
        key: {name: f"{found[key]:.{digits}f}" for name, found in result["lora"].items()}
        for key, digits in (("copies", 2), ("seconds", 1), ("times LoRA", 1))
    }
    return [
        f"Flat-LoRA on {result['parameters']:,} frozen parameters, rank 8, {result['rows']} rows a step, "
        f"one thread: peak memory over LoRA's, in copies of the base (bar {result['bar']:g}), and "
        "processor seconds a step. Peaks are those of live tensors; what malloc keeps varies by 20 MB from run "
        "to run, for both ([why](decisions.md#frozen-layers)):\n",
        table(columns),
    ]


def imports(result: Result) -> list[str]:
    found = result["seconds"]["import steppe after torch"]
    return [
        f"`import steppe` adds {span(found, 3)} s to `import torch` (n = {found['n']}, bar {result['bar']:g}).\n"
    ]


SECTIONS = {
    "step": ("A training step", step),
    "launches": ("Operations, which on a GPU are launches", launches),
    "scaling": ("With the number of weights and of tensors", scaling),
    "memory": ("Memory", memory),
    "lora": ("LoRA", lora),
    "imports": ("Import", imports),
}


def load(folder: Path = RESULTS) -> dict[str, Result]:
    paths = {name: folder / f"{name}.json" for name in SECTIONS}
    return {n: json.loads(p.read_text("utf-8")) for n, p in paths.items() if p.exists()}


def text(results: dict[str, Result]) -> str:
    parts = [HEAD]
    for name, (title, section) in SECTIONS.items():
        if name not in results:
            parts += [f"## {title}\n", "Not measured yet.\n"]
            continue
        result = results[name]
        script = "memory.py --lora" if name == "lora" else f"{name}.py"
        threads = f", {result['threads']} threads" if "threads" in result else ""
        where = f"{result['machine']}{threads}, torch {result['torch']}, {result['date']}"
        parts += [f"## {title}\n", f"`python benchmarks/{script}`, {where}.\n", *section(result)]
    return "\n".join(parts)


def draw(result: Result, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    labels = {"weights": "weights, in 4 tensors", "tensors": "tensors, of a million weights in all"}
    for axes, (what, label) in zip(panels, labels.items(), strict=True):
        counts = [int(c) for c in result[what]]
        for name, marker in zip(next(iter(result[what].values())), "osD", strict=True):
            medians = [found[name]["median"] for found in result[what].values()]
            axes.loglog(counts, medians, marker=marker, label=name)
        axes.set(xlabel=label, ylabel="ms a step")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    arguments = parser.parse_args()
    results = load()
    if arguments.check:
        if PAGE.read_text("utf-8") != text(results):
            sys.exit(f"{PAGE.name} is not what the results say: run python benchmarks/page.py")
        return
    PAGE.write_text(text(results), "utf-8")
    if "scaling" in results:
        draw(results["scaling"], FIGURE)
    print("written", PAGE)


if __name__ == "__main__":
    main()
