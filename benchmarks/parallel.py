"""Passes in parallel: what a step costs on two processes, and what they tell each other.

    python benchmarks/parallel.py [--rounds 15] [--width 1.0] [--quick] [--out FILE]

ResNet-18 (CIFAR form), batch 64 per pass, one thread per process, gloo. All contenders take turns
within one run of two processes; where one process works, the other waits. Times are the slower
rank's, medians are compared. m-ARWP's second device buys a second batch and the flat minimum; SAM's
would buy half of its time, which is shown beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

import measure

import steppe
from steppe.lab import models


def contender(
    method: steppe.Method, batch: int, width: float, group: Any, **options: Any
) -> measure.Step:
    """One training step of a method under DDP in the given group, with its own batch."""
    torch.manual_seed(0)
    model = models.build("resnet18", classes=10, shape=(3, 32, 32), width=width)
    model = DDP(model.to(memory_format=torch.channels_last), process_group=group)
    x = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,))
    bench = measure.Bench(model, measure.cross_entropy, x, y)
    perturber = steppe.attach(model, bench.optimizer, method, **options)

    def step() -> None:
        perturber.backward(lambda: bench.loss(x, y))
        bench.update()

    return step


def contenders(batch: int, width: float) -> dict[str, tuple[measure.Step, bool]]:
    """Each contender's step, and whether both processes take part in it."""
    alone, both = dist.new_group([0]), dist.group.WORLD
    sgd, sam, half = steppe.sgd(), steppe.sam(), batch // 2
    found: dict[str, tuple[measure.Step, bool]] = {}
    for name, method, size, group in (
        ("SGD, one process", sgd, batch, alone),
        ("SAM, one process", sam, batch, alone),
        ("SGD, two processes, half a batch each", sgd, half, both),
        ("SAM, two processes, half a batch each", sam, half, both),
        ("SGD, two processes, a batch each", sgd, batch, both),
        ("m-ARWP, two processes, a batch each", steppe.m_arwp(0.015), batch, both),
    ):
        mine = group is both or dist.get_rank() == 0
        step = contender(method, size, width, group) if mine else lambda: None
        found[name] = (step, group is both)
    return found


def in_turns(steps: dict[str, tuple[measure.Step, bool]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, (step, _) in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            spent = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            if turn:  # the first turn warms up
                times[name].append(float(spent))
    return times


def bytes_sent(step: measure.Step) -> int:
    """What this rank puts into collectives in one step, read off torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    shapes = [e.input_shapes for e in seen.events() if e.name.startswith("gloo:")]
    return sum(4 * math.prod(shape) for each in shapes for shape in each if shape)


def work(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    load = measure.environment()["load"]
    steps = contenders(arguments.batch, arguments.width)
    times = in_turns(steps, arguments.rounds)
    volumes = {name: bytes_sent(step) for name, (step, both) in steps.items() if both}
    climb = contender(
        steppe.sam(), arguments.batch // 2, arguments.width, dist.group.WORLD, ascent="global"
    )
    climb()  # DDP settles its buckets in the first step
    volumes["SAM, two processes, global ascent"] = bytes_sent(climb)
    if dist.get_rank() == 0:
        result = {"batch": arguments.batch, "width": arguments.width, "load_before": load}
        result |= {"times": measure.show(times, "s"), "bytes": volumes}
        for name, count in volumes.items():
            print(f"{name:42}{count / 1e6:10.2f} MB sent")
        print("written to", measure.write("parallel", result, arguments.out))
    dist.barrier()


def main() -> None:
    parser = measure.parser(__doc__, "two rounds of a narrow network")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender")
    parser.add_argument("--batch", type=int, default=64, help="samples per pass")
    parser.add_argument("--width", type=float, default=1.0, help="width multiplier of the network")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.width, arguments.batch = 2, 0.125, 8
    if "RANK" in os.environ:
        with steppe.process_group("gloo"):
            work(arguments)
        return
    os.execv(sys.executable, [*measure.TORCHRUN, "2", *sys.argv])


if __name__ == "__main__":
    main()
