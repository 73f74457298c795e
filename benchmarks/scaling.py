"""How the cost of perturbing grows: with the number of weights, and with the batch.

    python benchmarks/scaling.py [--rounds 15] [--threads 2] [--quick] [--out FILE]

Weights: what RWP and ARWP add to a step (moving the weights, putting them back, learning from gradients)
on square linear layers of 10^4 to 10^8 weights in all, next to an SGD step (`optimizer.step`) on them.
Batch: whole steps of a network of a million weights with SGD and ARWP in turns; what is added is the
median of the differences of neighbours.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import measure
import torch
from torch import nn

import steppe

COUNTS = [10**4, 10**5, 10**6, 10**7, 10**8]
BATCHES = [8, 32, 128, 512]
METHODS = {"RWP": steppe.rwp(0.001), "ARWP": steppe.arwp(0.001)}


def layers_of(count: int) -> nn.Sequential:
    """Four square layers with about `count` weights in all."""
    width = round((count / 4) ** 0.5)
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)])


def with_gradients(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers_of(count)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def sgd_step(count: int) -> Callable[[], object]:
    _, optimizer = with_gradients(count)
    return lambda: optimizer.step()


def added(count: int, name: str) -> Callable[[], object]:
    model, optimizer = with_gradients(count)
    return measure.added_by(steppe.attach(model, optimizer, METHODS[name]))


def over_weights(counts: list[int], rounds: int) -> dict[str, object]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for count in counts:
        steps = {"SGD's own step": sgd_step(count)} | {n: added(count, n) for n in METHODS}
        turns = rounds if count >= 10**7 else 5 * rounds
        times = measure.in_turns(steps, turns)
        found[str(count)] = {name: measure.summary(v) for name, v in times.items()}
        row = "".join(f"{name} {s['median']:.3f}  " for name, s in found[str(count)].items())
        print(f"{count:>11,} weights, ms: {row}", flush=True)
    return found


def over_batches(batches: list[int], rounds: int) -> dict[str, object]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for batch in batches:
        x = torch.randn(batch, 500)

        def stepper(method: steppe.Method, x: torch.Tensor = x) -> Callable[[], None]:
            model = layers_of(10**6)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
            steppe.attach(model, optimizer, method)

            def step() -> None:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        steps = {"SGD": stepper(steppe.sgd()), "ARWP": stepper(steppe.arwp(0.001))}
        times = measure.in_turns(steps, 5 * rounds)
        extra = [b - a for a, b in zip(times["SGD"], times["ARWP"], strict=True)]
        found[str(batch)] = {"SGD": measure.summary(times["SGD"]), "added": measure.summary(extra)}
        here = found[str(batch)]
        print(
            f"batch {batch:>5}, ms: SGD {here['SGD']['median']:.2f}, ARWP adds "
            f"{here['added']['median']:.2f} ({here['added']['low']:.2f} to {here['added']['high']:.2f})",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two small sizes, two rounds")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    crowded = measure.busy()
    rounds = 1 if arguments.quick else arguments.rounds
    counts, batches = (COUNTS[:2], BATCHES[:2]) if arguments.quick else (COUNTS, BATCHES)
    result = {
        "threads": arguments.threads,
        "weights": over_weights(counts, rounds),
        "batches": over_batches(batches, rounds),
    }
    measure.publish("scaling", result, arguments.out, crowded)


if __name__ == "__main__":
    main()
