"""What a training step costs: our methods beside SGD and pytorch-optimizer's SAM.

    python benchmarks/step.py [resnet18 vit mlp] [--rounds 6] [--threads 2] [--quick] [--out FILE]

All contenders take turns within one run, each with its own copy of the network, and medians are
compared. On a shared machine seconds of convolutions vary by more than a one-pass method adds; what it adds
(moving the weights, putting them back, learning from gradients that are already there) is also measured alone. With a
rise that is the mean over eight steps, of which two are measured and, under BatchNorm, one rests.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import measure
import torch

import steppe
from steppe.lab import models

RISES = {
    "RWP, ratio": steppe.rwp(ratio=0.5),
    "RWP, default rise": steppe.rwp(),
    "ARWP, ratio": steppe.arwp(ratio=0.5),
    "ARWP, default rise": steppe.arwp(),
}
NETS = {"resnet18": "resnet18", "vit": "vit-s", "mlp": "mlp"}


def bench(net: str, batch: int, width: float) -> measure.Bench:
    torch.manual_seed(0)
    shape = (1, 8, 8) if net == "mlp" else (3, 32, 32)
    form = torch.channels_last if net == "resnet18" else torch.contiguous_format
    model = models.build(NETS[net], classes=10, shape=shape, width=width).to(memory_format=form)
    x = torch.randn(batch, *shape).contiguous(memory_format=form)
    y = torch.randint(0, 10, (batch,))
    return measure.Bench(model, measure.cross_entropy, x, y)


def peer_sam(bench: measure.Bench) -> measure.Step:
    from pytorch_optimizer import SAM

    options = {"rho": 0.05, "lr": 1e-3, "momentum": 0.9}
    optimizer = SAM(bench.model.parameters(), torch.optim.SGD, **options)

    def step() -> None:
        bench.backward()
        optimizer.first_step(zero_grad=True)
        bench.backward()
        optimizer.second_step(zero_grad=True)

    return step


def run(net: str, rounds: int, quick: bool) -> dict[str, Any]:
    batch, width = 8 if quick else 128, 0.125 if quick and net != "mlp" else 1.0

    def new() -> measure.Bench:
        return bench(net, batch, width)

    count = sum(p.numel() for p in new().model.parameters())
    print(f"\n{net}, {count:,} parameters, batch {batch}: whole steps, then what is added")
    steps = {"SGD": new().plain_step, "SAM of pytorch-optimizer": peer_sam(new())}
    methods = measure.METHODS | RISES
    steps |= {name: new().step_with(method) for name, method in methods.items()}
    whole = measure.show(measure.in_turns(steps, rounds), "ms")
    parts = {name: new().added_by(methods[name]) for name in ("RWP", "ARWP", "MSAM", *RISES)}
    times = measure.in_turns(parts, 3 * rounds)
    for name in (name for name in times if methods[name].steered):
        times[name] = [ms / measure.CYCLE for ms in times[name]]
    added = measure.show(times, "ms")
    return {"parameters": count, "batch": batch, "width": width, "steps": whole, "added": added}


def main() -> None:
    parser = measure.parser(__doc__, "a round or two of narrow networks")
    parser.add_argument("nets", nargs="*", default=list(NETS), help=f"of {', '.join(NETS)}")
    parser.add_argument(
        "--rounds", type=int, default=6, help="steps; half for vit, ten times for mlp"
    )
    parser.add_argument("--threads", type=int, default=2)
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
