"""Peak memory of a training step over plain SGD, in copies of the parameters.

    python benchmarks/memory.py [--layers 6] [--quick] [--out FILE]

Each contender trains a stack of 4096-wide linear layers (100 M parameters, 0.4 GB) for three steps in a
process of its own; the highest resident memory is read from the operating system, the one of SGD taken
off, and the rest divided by the size of the parameters. Load does not matter.

`--lora`: Flat-LoRA trains LoRA adapters (rank 8) on the same stack, frozen, on 512 rows, in float32 and bfloat16;
its memory is over that of LoRA without noise, and its time is processor time of one thread, which load
changes little, per step and as a multiple of LoRA's. Peaks are taken in processes of their own in which
malloc gives large tensors back at once (MALLOC_MMAP_THRESHOLD_): otherwise they vary by 20 MB from run to
run, for both, with what it keeps.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import measure
import torch
from torch import nn

import steppe

METHODS = {
    "RWP": (steppe.rwp(0.001), 1.1),
    "ARWP": (steppe.arwp(0.001), 1.1),
    "MSAM": (steppe.msam(0.1), 2.1),
    "ARWP, element-wise": (steppe.arwp(0.001, elementwise=True), 2.1),
    "SAM": (steppe.sam(0.05), None),
    "ASAM": (steppe.asam(0.05), None),
    "m-RWP": (steppe.m_rwp(0.001), 2.1),
    "m-ARWP": (steppe.m_arwp(0.001), 2.1),
    "m-ARWP, element-wise": (steppe.m_arwp(0.001, elementwise=True), None),
}
"""By name the method and its bar, where there is one."""
LORA_BAR = 0.15
ROWS, FIRST_STEPS, STEPS = 512, 11, 4
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def train(name: str, layers: int, width: int) -> None:
    """Three steps in this process; prints its peak memory in bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    x = torch.randn(4, width)
    bench = measure.Bench(model, lambda model, x: model(x).square().mean(), x, momentum=0.0)
    step = bench.step_with(METHODS[name][0] if name in METHODS else steppe.sgd())
    for _ in range(3):
        step()
    print_peak()


def train_lora(name: str, layers: int, width: int) -> None:
    """Steps with LoRA in this process, by the rise from the first on; prints seconds a step and peak."""
    from peft import LoraConfig, get_peft_model

    kind, _, dtype = name.partition(", ")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = nn.Sequential(
        *[nn.Linear(width, width, dtype=getattr(torch, dtype)) for _ in range(layers)]
    )
    config = LoraConfig(r=8, target_modules=[str(n) for n in range(layers)])
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if kind == "Flat-LoRA":
        steppe.attach(model, optimizer, steppe.flat_lora(rise=steppe.constant(0.05)))
    x = torch.randn(ROWS, width, dtype=getattr(torch, dtype))
    begin = 0.0
    peak_only = GIVES_BACK.keys() <= os.environ.keys()
    for step in range(3 if peak_only else FIRST_STEPS + STEPS):
        if step == FIRST_STEPS:  # until then the rise is measured in every step
            begin = time.process_time()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print((time.process_time() - begin) / STEPS)
    print_peak()


def print_peak() -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak if sys.platform == "darwin" else 1024 * peak)


def peak_of(
    name: str, sizes: argparse.Namespace, environment: Mapping[str, str] = {}
) -> list[float]:
    """What the process of one contender prints."""
    command = [sys.executable, __file__, "--one", name]
    command += ["--layers", str(sizes.layers), "--width", str(sizes.width)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return [float(line) for line in done.stdout.split()]


def compare_lora(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Flat-LoRA beside LoRA, each in a process of its own."""
    print(f"{size // 4:,} frozen parameters, {ROWS} rows a step; over LoRA, in copies of them")
    found = {}
    for dtype in ("float32",) if arguments.quick else ("float32", "bfloat16"):
        names = (f"LoRA, {dtype}", f"Flat-LoRA, {dtype}")
        base, seconds = (peak_of(name, arguments)[0] for name in names)
        plain, peak = (peak_of(name, arguments, GIVES_BACK)[1] for name in names)
        found[names[1]] = {
            "copies": (peak - plain) / (size * getattr(torch, dtype).itemsize / 4),
            "seconds": seconds,
            "times LoRA": seconds / base,
        }
        print(names[1], found[names[1]], f"(bar {LORA_BAR} copies)", flush=True)
    return {"parameters": size // 4, "rows": ROWS, "bar": LORA_BAR, "lora": found}


def compare(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The methods beside SGD, each in a process of its own."""
    print(f"{size // 4:,} parameters; extra peak memory over SGD, in copies of them")
    (plain,) = peak_of("SGD", arguments)
    found = {}
    for name in ("RWP", "MSAM", "SAM") if arguments.quick else METHODS:
        found[name] = (peak_of(name, arguments)[0] - plain) / size
        print(f"{name:24}{found[name]:>7.2f}  (bar {METHODS[name][1]})", flush=True)
    bars = {name: bar for name, (_, bar) in METHODS.items() if bar}
    return {"parameters": size // 4, "copies": found, "bars": bars}


def main() -> None:
    parser = measure.parser(__doc__, "a small network, three contenders")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--lora", action="store_true", help="Flat-LoRA beside LoRA, nothing else")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run = train_lora if "LoRA" in arguments.one else train
        run(arguments.one, arguments.layers, arguments.width)
        return
    if arguments.quick:
        arguments.layers = 1
    size = 4 * arguments.layers * (arguments.width**2 + arguments.width)
    name, work = ("lora", compare_lora) if arguments.lora else ("memory", compare)
    print("written to", measure.write(name, work(size, arguments), arguments.out))


if __name__ == "__main__":
    main()
