"""What strength does a deep convolution net bear without tuning? The methods at a grid of ratios.

    python benchmarks/deep_strength.py [--root FOLDER] [--seeds 2] [--jobs 2] [--quick] [--out FILE]

The recipe `cifar10-small` trains on 5,000 images. What is compared is the accuracy on the 45,000 training
images it leaves alone: the test data has no part in choosing a default, and neither have the seeds that
studies report. Constant strengths, which is what `attach` does with a number, and rising ones, as
recipes have them for RWP. BatchNorm statistics as trained and recomputed. Runs are kept in `--store`
and written as they end; the same command takes up where it was stopped. Conclusions: docs/decisions.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch

import steppe
from steppe import lab
from steppe.lab import Config, LabError, Sources, data
from steppe.lab.evaluation import evaluate
from steppe.lab.problems import load_data, load_problem
from steppe.lab.recipes import recipe
from steppe.lab.specs import parse
from steppe.lab.statistics import mean_std

FIRST_SEED = 20_000
FACTS = ("train_accuracy", "accuracy", "accuracy_recomputed", "loss")
METHODS = (
    "sgd",
    *[f"rwp:ratio={ratio},schedule=constant" for ratio in (0.1, 0.2, 0.3)],
    *[f"m-rwp:ratio={ratio}" for ratio in (0.15, 0.3)],
    *[f"rwp:ratio={ratio}" for ratio in (0.2, 0.3)],
    *["rwp:ratio=0.6,schedule=constant", "rwp:ratio=0.6", "m-rwp:ratio=0.45", "m-rwp:ratio=0.9"],
)
"""The candidates first, the wider picture after them."""


def run(config: Config, store: Path) -> dict[str, Any]:
    """Train, and measure the final model on the training images that the recipe leaves alone."""
    torch.set_num_threads(1)
    result = lab.train(config, store=store, progress=False)
    problem = load_problem(config, Sources())
    model, own = problem.model, problem.data.train
    rest = unused(config, own)
    assert result.folder is not None
    model.load_state_dict(torch.load(result.folder / "model.pt"))
    found = evaluate(model, rest, problem.task)
    order = data.sequential_order(len(own), 256)
    steppe.recompute_norm_stats(model, [x for x, _ in own.batches(order, augment_seed=0)])
    again = evaluate(model, rest, problem.task)
    return {
        "method": config.method,
        "seed": config.seed,
        "train_accuracy": result.metrics["train"]["accuracy"],
        "accuracy": found["accuracy"],
        "loss": found["loss"],
        "accuracy_recomputed": again["accuracy"],
        "loss_recomputed": again["loss"],
        "images": len(rest),
    }


def unused(config: Config, used: data.Split) -> data.Split:
    """The training samples that are not trained on."""
    whole = load_data(config.replace(train_size=None, label_noise=0.0), Sources()).train
    assert isinstance(whole, data.MemorySplit)
    assert isinstance(used, data.MemorySplit)
    seen = {image.numpy().tobytes() for image in used.inputs}
    left = [i for i, image in enumerate(whole.inputs) if image.numpy().tobytes() not in seen]
    if not left:
        raise LabError(f"{config.recipe} trains on everything: there is nothing to compare on.")
    return whole.subset(torch.tensor(left))


def table(runs: list[dict[str, Any]]) -> None:
    """Each method with n, its gain over plain training from the same seed, and the standard error."""
    plain = {r["seed"]: r for r in runs if r["method"] == "sgd"}
    print(f"{'method':34}n  train  accuracy         gain   recomputed         gain   loss")
    for method, group in itertools.groupby(runs, key=lambda r: r["method"]):
        found = list(group)
        mean = {fact: mean_std([r[fact] for r in found])[0] for fact in FACTS}
        row = f"{method:34}{len(found)}{mean['train_accuracy']:7.1f}"
        for fact in ("accuracy", "accuracy_recomputed"):
            gain, std = mean_std([r[fact] - plain[r["seed"]][fact] for r in found])
            error = f"± {std / math.sqrt(len(found)):4.2f}" if len(found) > 1 else ""
            row += f"{mean[fact]:10.2f}{gain:+7.2f} {error:6}"
        print(f"{row}{mean['loss']:7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="cifar10-small", help="what is trained")
    parser.add_argument("--root", help="folder of the data sets")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread")
    parser.add_argument("--store", type=Path, default=Path("runs/deep-strength"))
    parser.add_argument("--quick", action="store_true", help="two methods, two steps, a narrow net")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    base = recipe(arguments.recipe).replace(root=arguments.root, threads=1, eval_every=0)
    methods = METHODS
    if arguments.quick:
        base, methods = base.replace(steps=2, width=1 / 8), ("sgd", "m-rwp:ratio=0.15")
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    # Seed by seed, so that a benchmark stopped early has whole columns.
    configs = [parse(method).apply(base.replace(seed=seed)) for seed in seeds for method in methods]
    work = partial(run, store=arguments.store)
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        runs: list[dict[str, Any]] = []
        try:
            for found in pool.imap(work, configs):
                runs.append(found)
                runs.sort(key=lambda r: (methods.index(r["method"]), r["seed"]))
                result = {"recipe": arguments.recipe, "runs": runs}
                path = measure.write("deep_strength", result, arguments.out)
                print(found, flush=True)
        except LabError as error:
            parser.error(str(error))
    table(runs)
    print("written to", path)


if __name__ == "__main__":
    main()
