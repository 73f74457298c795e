"""What a training step costs: our methods, SGD, pytorch-optimizer's SAM and the released ARWP.

    python benchmarks/step.py [resnet18 vit mlp] [--rounds 6] [--threads 2] [--quick] [--out FILE]

All contenders take turns within one run, each with its own copy of the network, and medians are
compared. Besides whole steps, two parts are measured alone, since on a shared machine seconds of
convolutions vary by more than a method adds: what a one-pass method adds (moving the weights, putting
them back, learning from gradients that are already there), and steps whose loss costs next to nothing,
which leave what a method does around its gradients.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import measure
import torch
from released import ReleasedARWP
from torch import Tensor, nn

import steppe
from steppe.lab import models

Step = Callable[[], object]
NETS = ("resnet18", "vit", "mlp")
METHODS = {
    "RWP": steppe.rwp(0.01),
    "ARWP": steppe.arwp(0.01),
    "m-RWP": steppe.m_rwp(0.015),
    "m-ARWP": steppe.m_arwp(0.015),
    "SAM": steppe.sam(0.05),
    "ASAM": steppe.asam(0.5),
    "MSAM": steppe.msam(3.0),
}


class Bench:
    """A network, its batches and its optimizer, made anew for every contender."""

    def __init__(self, net: str, quick: bool, free: bool = False) -> None:
        """`free`: the loss is a sum of the weights, which costs next to nothing."""
        self.free = free
        self.net, self.batch = net, 8 if quick else 128
        self.width = 0.125 if quick and net != "mlp" else 1.0
        torch.manual_seed(0)
        self.shape = (1, 8, 8) if net == "mlp" else (3, 32, 32)
        self.x = torch.randn(self.batch, *self.shape)
        if net == "resnet18":
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.y = torch.randint(0, 10, (self.batch,))

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        name = {"resnet18": "resnet18", "vit": "vit-s", "mlp": "mlp"}[self.net]
        model = models.build(name, classes=10, shape=self.shape, width=self.width)
        return model.to(memory_format=torch.channels_last) if self.net == "resnet18" else model

    def loss(self, model: nn.Module) -> Tensor:
        if self.free:
            return torch.stack([p.sum() for p in model.parameters()]).sum()
        return nn.functional.cross_entropy(model(self.x), self.y)

    def sgd(self, model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def plain(self) -> Step:
        model = self.model()
        optimizer = self.sgd(model)

        def step() -> None:
            self.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def ours(self, method: steppe.Method) -> Step:
        model = self.model()
        optimizer = self.sgd(model)
        perturber = steppe.attach(model, optimizer, method)
        batches = [()] * method.batches_needed

        def step() -> None:
            perturber.backward(lambda: self.loss(model), *batches)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def released(self) -> Step:
        model = self.model()
        optimizer = self.sgd(model)
        arwp = ReleasedARWP(model, 0.01)

        def step() -> None:
            arwp.perturb()
            self.loss(model).backward()
            arwp.restore()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def peer_sam(self) -> Step:
        from pytorch_optimizer import SAM

        model = self.model()
        optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=1e-3, momentum=0.9)

        def step() -> None:
            self.loss(model).backward()
            optimizer.first_step(zero_grad=True)
            self.loss(model).backward()
            optimizer.second_step(zero_grad=True)

        return step

    def added_by(self, method: steppe.Method) -> Step:
        """Only what a one-pass method adds to a step, on gradients that are already there."""
        model = self.model()
        optimizer = self.sgd(model)
        perturber = steppe.attach(model, optimizer, method)
        self.loss(model).backward()
        return measure.added_by(perturber)

    def added_by_released(self) -> Step:
        model = self.model().to(memory_format=torch.contiguous_format)  # what it is fastest on
        arwp = ReleasedARWP(model, 0.01)
        self.loss(model).backward()

        def step() -> None:
            arwp.perturb()
            arwp.restore()

        return step

    def everybody(self) -> dict[str, Step]:
        steps = {"SGD": self.plain(), "ARWP, released form": self.released()}
        steps["SAM of pytorch-optimizer"] = self.peer_sam()
        steps |= {name: self.ours(method) for name, method in METHODS.items()}
        return steps


def timed(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    return {name: measure.summary(v) for name, v in measure.in_turns(steps, rounds).items()}


def run(net: str, rounds: int, quick: bool) -> dict[str, object]:
    bench = Bench(net, quick)
    whole = timed(bench.everybody(), rounds)
    free = timed(Bench(net, quick, free=True).everybody(), 3 * rounds)
    parts = {"ARWP, released form": bench.added_by_released()}
    parts |= {name: bench.added_by(METHODS[name]) for name in ("RWP", "ARWP", "MSAM")}
    added = timed(parts, 3 * rounds)
    show(bench, whole, added, rounds)
    print("a loss that costs nothing, ms")
    for name, s in free.items():
        print(f"{name:28}{s['median']:>11.2f}")
    count = sum(p.numel() for p in bench.model().parameters())
    return {
        "parameters": count,
        "batch": bench.batch,
        "width": bench.width,
        "steps": whole,
        "free": free,
        "added": added,
    }


def show(
    bench: Bench,
    whole: dict[str, dict[str, float]],
    added: dict[str, dict[str, float]],
    rounds: int,
) -> None:
    count = sum(p.numel() for p in bench.model().parameters())
    print(f"\n{bench.net}, {count:,} parameters, batch {bench.batch}, n = {rounds}")
    print(f"{'':28}{'ms a step':>11}{'quartiles':>18}{'× SGD':>8}")
    base = whole["SGD"]["median"]
    for name, s in whole.items():
        span = f"{s['low']:.1f}–{s['high']:.1f}"
        print(f"{name:28}{s['median']:>11.1f}{span:>18}{s['median'] / base:>8.3f}")
    print(f"{'added alone':28}{'ms':>11}{'quartiles':>18}{'of released':>13}{'of SGD':>9}")
    released = added["ARWP, released form"]["median"]
    for name, s in added.items():
        span = f"{s['low']:.2f}–{s['high']:.2f}"
        share = s["median"] / base
        print(
            f"{name:28}{s['median']:>11.2f}{span:>18}{s['median'] / released:>13.2f}{share:>9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nets", nargs="*", default=list(NETS), help=f"of {', '.join(NETS)}")
    parser.add_argument(
        "--rounds", type=int, default=6, help="steps; half for vit, ten times for mlp"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a round or two of narrow networks")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    arguments = parser.parse_args()
    if unknown := set(arguments.nets) - set(NETS):
        parser.error(f"unknown network {', '.join(unknown)}; known are {', '.join(NETS)}")
    torch.set_num_threads(arguments.threads)
    rounds = 1 if arguments.quick else arguments.rounds
    crowded = measure.busy()
    turns = {"resnet18": rounds, "vit": -(-rounds // 2), "mlp": 10 * rounds}
    # networks that are not measured now keep their last numbers
    results = {} if arguments.quick else measure.stored("step", arguments.out).get("nets", {})
    results |= {net: run(net, turns[net], arguments.quick) for net in arguments.nets}
    measure.publish("step", {"threads": arguments.threads, "nets": results}, arguments.out, crowded)


if __name__ == "__main__":
    main()
