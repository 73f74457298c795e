"""Write docs/performance.md and its figure from the published results.

    python benchmarks/page.py [--check]

Nothing on that page is typed by hand; `--check` fails if it is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURE = DOCS / "performance.md", DOCS / "performance-scaling.png"
Result = dict[str, Any]

HEAD = """\
<!-- written by benchmarks/page.py from benchmarks/results: do not edit -->
# Performance

What a step costs beside what a user would run instead. Every number is a ratio or a median from one run in
which all contenders take turns; quartiles stand in brackets. Timings are published only from a machine
that was idle before the run. All of it was measured on the CPU; on a GPU the same code issues the same few
batched operations without waiting for the device, but none of it was run there. `make bench` repeats
everything and writes this page again.
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def span(s: dict[str, float], digits: int = 1, by: float = 1.0) -> str:
    median, low, high = (f"{s[key] / by:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} [{low}, {high}]"


def timings(found: Result, unit: str, digits: int = 2, by: float = 1.0) -> str:
    """A row for each contender: median, quartiles and n."""
    rows = [[name, span(s, digits, by), f"{s['n']:.0f}"] for name, s in found.items()]
    return table(["", unit, "n"], rows)


def source(result: Result, script: str) -> str:
    count = result.get("threads")
    threads = f", {count} thread{'s' * (count != 1)}" if count else ""
    return (
        f"`python benchmarks/{script}`, {result['machine']}{threads}, torch {result['torch']}, "
        f"{result['date']}.\n"
    )


def verdict(value: float, bar: float, digits: int = 2) -> str:
    return f"{value:.{digits}f} ({'meets' if value <= bar else 'misses'} {bar:g})"


def step(result: Result) -> list[str]:
    names = {"resnet18": "ResNet-18, CIFAR form", "vit": "ViT-S", "mlp": "MLP 64-128-128-10"}
    parts = [
        "On a shared machine whole steps of seconds vary by a tenth from one to the next, more than a "
        "one-pass method adds. Its parts are therefore measured alone too, and judged by.\n"
    ]
    for net, found in result["nets"].items():
        steps, added = found["steps"], found["added"]
        sgd, released = steps["SGD"]["median"], added["ARWP, released form"]["median"]
        n = f"{next(iter(steps.values()))['n']:.0f}"
        parts.append(
            f"**{names[net]}**, {found['parameters']:,} parameters, batch {found['batch']}, n = {n} steps "
            f"each, an SGD step takes {span(steps['SGD'])} ms:\n"
        )
        rows = [[name, span(s, 3, sgd)] for name, s in steps.items() if name != "SGD"]
        parts.append(table(["", "× an SGD step"], rows))
        rows = [
            [name, span(s, 2), f"{s['median'] / released:.2f}", f"{s['median'] / sgd:.1%}"]
            for name, s in added.items()
        ]
        parts.append("What one-pass methods add, measured alone:\n")
        parts.append(table(["", "ms", "of the released form", "of an SGD step"], rows))
        rows = [[name, span(s, 2)] for name, s in found["free"].items()]
        parts.append(
            "Steps whose loss costs next to nothing, which leave what a method does itself:\n"
        )
        parts.append(table(["", "ms"], rows))
        parts.append(bars(net, steps, added, found["free"]))
    parts.append(
        "*Released form*: per-tensor loops, full-size history, clones and `.item()` as in the authors' "
        "scripts, written anew (`benchmarks/released.py`).\n"
    )
    return parts


def bars(net: str, steps: Result, added: Result, free: Result) -> str:
    sgd, released = steps["SGD"]["median"], added["ARWP, released form"]["median"]
    lines = [
        f"- {name} adds {verdict(added[name]['median'] / released, 0.55)} of what the released form adds."
        for name in ("RWP", "ARWP")
    ]
    if net == "resnet18":
        lines += [
            f"- {name} adds {verdict(added[name]['median'] / sgd, 0.04, 3)} of an SGD step."
            for name in ("RWP", "ARWP")
        ]
    gradient = sgd - free["SGD"]["median"]

    def against(name: str, other: str, said: str) -> str:
        whole = steps[name]["median"] / steps[other]["median"]
        both = [free[who]["median"] + 2 * gradient for who in (name, other)]
        return (
            f"- {name} takes {verdict(both[0] / both[1], 1.02, 3)} of {said}, from what each does around "
            f"its two gradients; {whole:.2f} by whole steps."
        )

    lines.append(against("SAM", "SAM of pytorch-optimizer", "`pytorch-optimizer`'s SAM"))
    lines += [against(name, "SAM", "SAM, in one process") for name in ("m-RWP", "m-ARWP")]
    return "Against the bars that were set before:\n\n" + "\n".join(lines) + "\n"


def scaling(result: Result) -> list[str]:
    names, parts = list(next(iter(result["weights"].values()))), []
    for what, said in (("weights", "weights"), ("tensors", "tensors, a million weights in all")):
        rows = [
            [f"{int(count):,}", *[span(found[name], 3) for name in names]]
            for count, found in result[what].items()
        ]
        parts.append(f"Milliseconds that are added to a step, by the number of {said}:\n")
        parts.append(table([what, *names], rows))
    found = dict(result["embedding"])
    seen = found.pop("rows in the batch")
    parts.append(
        f"A net of MiniLM's sizes, 16 sequences of 32 tokens ({seen} of the embedding's 30,522 rows), ms:\n"
    )
    parts.append(table(["", "ms"], [[n, span(f, 1)] for n, f in found.items()]))
    rows = [[b, span(f["SGD"], 2), span(f["added"], 2)] for b, f in result["batches"].items()]
    said = "Cost against the number of weights, of tensors, and the batch"
    return [
        *parts,
        "Milliseconds that ARWP adds to whole steps of a million weights, by the batch:\n",
        table(["batch", "SGD", "ARWP adds"], rows),
        f"![{said}]({FIGURE.name})\n",
    ]


def memory(result: Result) -> list[str]:
    rows = [
        [name, f"{copies:.2f}", f"{result['bars'][name]:g}" if name in result["bars"] else ""]
        for name, copies in result["copies"].items()
    ]
    return [
        f"Peak memory over SGD's, in copies of {result['parameters']:,} parameters:\n",
        table(["", "copies", "bar"], rows),
    ]


def lora(result: Result) -> list[str]:
    rows = [
        [name, f"{f['copies']:.2f}", f"{f['seconds']:.1f}", f"{f['times LoRA']:.1f}"]
        for name, f in result["lora"].items()
    ]
    return [
        f"Flat-LoRA on {result['parameters']:,} frozen parameters, rank 8, {result['rows']} rows a step, "
        f"one thread: peak memory over LoRA's, in copies of the base (bar {result['bar']:g}), and "
        "processor seconds a step. Peaks are those of live tensors; what malloc keeps varies by 20 MB from run "
        "to run, for both ([why](decisions.md#frozen-layers)):\n",
        table(["", "copies", "seconds", "times LoRA"], rows),
    ]


def imports(result: Result) -> list[str]:
    own = result["seconds"]["import steppe after torch"]
    return [
        timings(result["seconds"], "seconds", 3),
        f"`import steppe` adds {verdict(own['median'], result['bar'], 3)} s to `import torch`.\n",
    ]


def data(result: Result) -> list[str]:
    shares = ", ".join(f"{share:.2%} ({name})" for name, share in result["share_of_step"].items())
    return [
        f"{result['what']}:\n",
        timings(result["milliseconds"], "ms"),
        f"Whole batches are {result['speedup']:.1f} times faster than samples one by one, and take "
        f"{shares} of a ResNet-18 step.\n",
    ]


def parallel(result: Result) -> list[str]:
    base = result["times"]["SGD, one process"]["median"]
    return [
        f"ResNet-18, batch {result['batch']} per pass, one thread a process:\n",
        timings(result["times"], "× an SGD step in one process", by=base),
        "What this shows is on the page about [parallel passes](parallel.md).\n",
    ]


def analysis(result: Result) -> list[str]:
    product, plane = result["product"], result["landscape"]
    over, speed = product["ours_over"], plane["naive_over_ours"]
    rows = [
        [
            stage,
            f"{found['largest'][0]:.4g}, {found['largest'][1]:.4g}",
            *[
                ", ".join(_products(search) for search in found[who])
                for who in ("top_eigs", "pyhessian")
            ],
        ]
        for stage, found in result["eigenvalue"]["stages"].items()
    ]
    return [
        f"{result['network']}, {result['parameters']:,} parameters, {result['samples']} images, "
        f"{result['clock']}.\n",
        f"- A Hessian product ({product['batches']}) takes "
        f"{verdict(over['pyhessian']['median'], product['bars']['pyhessian'])} of PyHessian's time and "
        f"{verdict(over['forward']['median'], product['bars']['forward'], 1)} forwards, "
        f"n = {over['forward']['n']}.",
        f"- A landscape of {plane['grid']} x {plane['grid']} points is {span(speed, 2)} times faster than "
        f"the loop over {plane['naive']} with `load_state_dict` (asked for: {plane['bar']:g}), "
        f"n = {speed['n']}; {plane['ms_a_point_ours'][0]:.0f} ms a point.\n",
        f"Products until the largest eigenvalue is within {result['eigenvalue']['tol']:g} (in brackets: "
        "until the method's own rule stops), two starts; a dash where that was never reached:\n",
        table(["network", "two largest", "`top_eigs`", "PyHessian"], rows),
    ]


def _products(search: dict[str, float | None]) -> str:
    needed = "–" if search["needed"] is None else search["needed"]
    return f"{needed} [{search['stopped']}]"


def launches(result: Result) -> list[str]:
    nets = list(next(iter(result["counts"].values())))
    rows = [[name, *[f"{c[net]:.3g}" for net in nets]] for name, c in result["counts"].items()]
    parts = [
        "Operations for each perturbed pass beyond forwards, backwards and the optimizer's step, counted on "
        "the `meta` device with a GPU's block sizes. They do not grow with depth. The bars are "
        f"{result['bars']['transformer']} for a transformer and {result['bars']['resnet18']} for ResNet-18.\n",
        table(["", *nets], rows),
    ]
    for net, found in result["times"].items():
        sgd, wanted = found["SGD"]["median"], result["time_bars"][net]
        rows = [
            [name, f"{s['median'] / sgd:.2f}", f"{wanted[name]:g}" if name in wanted else ""]
            for name, s in found.items()
        ]
        parts += [
            f"Whole steps where operations are all there is ({net}, one thread), × SGD's:\n",
            table(["", "× an SGD step", "bar"], rows),
        ]
    return parts


SECTIONS = {
    "step": ("A training step", step),
    "launches": ("Operations, which on a GPU are launches", launches),
    "scaling": ("With the number of weights, of tensors, and with the batch", scaling),
    "memory": ("Memory", memory),
    "lora": ("LoRA", lora),
    "parallel": ("Two processes", parallel),
    "imports": ("Import", imports),
    "data": ("Batches", data),
    "analysis": ("Analysis", analysis),
}


def load(folder: Path = measure.RESULTS) -> dict[str, Result]:
    paths = {name: folder / f"{name}.json" for name in SECTIONS}
    return {n: json.loads(p.read_text("utf-8")) for n, p in paths.items() if p.exists()}


def text(results: dict[str, Result]) -> str:
    parts = [HEAD]
    for name, (title, section) in SECTIONS.items():
        if name in results:
            result = results[name]
            script = "memory.py --lora" if name == "lora" else f"{name}.py"
            parts += [f"## {title}\n", source(result, script), *section(result)]
    missing = [name for name in SECTIONS if name not in results]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.\n")
    return "\n".join(parts)


def draw(result: Result, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    names = list(next(iter(result["weights"].values())))
    for axes, what in ((left, "weights"), (middle, "tensors")):
        counts = [int(c) for c in result[what]]
        for name, marker in zip(names, "osD", strict=True):
            medians = [found[name]["median"] for found in result[what].values()]
            axes.loglog(counts, medians, marker=marker, label=name)
    left.set(xlabel="weights, in 4 tensors", ylabel="ms a step")
    middle.set(xlabel="tensors, of a million weights in all", ylabel="ms a step")
    left.legend(frameon=False)
    batches = [int(b) for b in result["batches"]]
    for key, label, marker in (("SGD", "SGD step", "o"), ("added", "added by ARWP", "D")):
        found = [f[key] for f in result["batches"].values()]
        medians = [f["median"] for f in found]
        spread = [[f["median"] - f["low"] for f in found], [f["high"] - f["median"] for f in found]]
        right.errorbar(batches, medians, yerr=spread, marker=marker, capsize=3, label=label)
    right.set(xlabel="batch", ylabel="ms", xscale="log", xticks=batches, xticklabels=batches)
    right.minorticks_off()
    right.set_ylim(bottom=0)
    right.legend(frameon=False)
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
