"""A ResNet's step on 16x16 images: 2x2 pixels by a matrix product against torch's convolution.

    python benchmarks/convolution.py [--rounds 100] [--quick] [--out FILE]

Forward and backward of the ResNet-18 of a quarter width that the CIFAR studies train, batch 128,
one thread. The two take turns; the ratio is taken turn by turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import measure
import torch
from torch import nn

from steppe.lab import models
from steppe.lab.models.resnet import Convolution


def training_pass(plain: bool) -> Callable[[], None]:
    model = models.build("resnet18", classes=10, shape=(3, 16, 16), width=0.25)
    model = model.to(memory_format=torch.channels_last)
    for module in model.modules():
        if plain and isinstance(module, Convolution):
            module.__class__ = nn.Conv2d
    x = torch.randn(128, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (128,))

    def run() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    return run


def main() -> None:
    parser = measure.parser(__doc__, "one round")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contenders = {"torch's convolution": training_pass(True), "ours": training_pass(False)}
    crowded = measure.busy()
    times = measure.in_turns(contenders, 1 if arguments.quick else arguments.rounds)
    plain, ours = times.values()
    ratio = measure.summary([b / a for a, b in zip(plain, ours, strict=True)])
    found = {name: measure.summary(v) for name, v in times.items()}
    for name, s in found.items():
        print(f"{name:20} {s['median']:6.1f} ms ({s['low']:.1f} to {s['high']:.1f})")
    print(f"{'ratio':20} {ratio['median']:6.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")
    result = {"milliseconds": found, "ratio": ratio, "threads": 1}
    measure.publish("convolution", result, arguments.out, crowded)


if __name__ == "__main__":
    main()
