"""Augmented batches: whole batches of bytes against the usual pipeline, one sample at a time.

    python benchmarks/data.py [--quick] [--threads 2] [--out FILE]

Flip, crop with padding, Cutout and normalisation of CIFAR-10 in batches of 128, as
`steppe.lab.data` does it and as a `Dataset` with per-image transforms in a `DataLoader` does it,
beside a training step of the ResNet-18 that eats the batches. All are measured in turns within
one run, so a neighbour's load falls on each alike; medians are compared. Random bytes of
its shape take CIFAR-10's place: the work is the same.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from steppe.lab import data, models
from steppe.lab.data.readers import NORMALISATION

BATCH = 128
CIFAR10 = NORMALISATION["cifar10"]
AUGMENT = ("flip", "crop", "cutout")
REPEATS = {"whole batch": 20, "per sample": 3, "whole batch, RandAugment": 3}


class PerSample(Dataset[tuple[Tensor, int]]):
    """CIFAR-10 the usual way: one image at a time through a list of transforms, without PIL."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels.tolist()
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in (CIFAR10.mean, CIFAR10.std))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index].float() / 255
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = F.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        image = (image - self.mean) / self.std
        if torch.rand(()) < 0.5:
            row, column = torch.randint(0, 32, (2,)).tolist()
            image[:, max(row - 8, 0) : row + 8, max(column - 8, 0) : column + 8] = 0
        return image, self.labels[index]


def whole_batches(split: data.MemorySplit) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count():
        order = data.epoch_order(len(split), BATCH, seed=0, epoch=epoch, drop_last=True)
        yield from split.batches(order, augment_seed=epoch)


def per_sample_batches(split: data.MemorySplit) -> Iterator[tuple[Tensor, Tensor]]:
    dataset = PerSample(split.inputs, split.targets)
    while True:
        yield from DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)


def training_step(width: float) -> Callable[[], None]:
    model = models.build("resnet18", classes=10, shape=(3, 32, 32), width=width)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def training_split() -> data.MemorySplit:
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50_000, 3, 32, 32), generator=draws, dtype=torch.uint8)
    labels = torch.randint(0, 10, (50_000,), generator=draws)
    return data.MemorySplit(images, labels, CIFAR10).augmented(AUGMENT)


def main() -> None:
    parser = measure.parser(__doc__, "few rounds, narrow network only")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    split = training_split()
    ours, usual = whole_batches(split), per_sample_batches(split)
    vit = whole_batches(split.augmented(("randaugment", "crop", "flip")))
    contenders: dict[str, Callable[[], object]] = {
        "whole batch": lambda: next(ours),
        "per sample": lambda: next(usual),
        "whole batch, RandAugment": lambda: next(vit),
        "ResNet-18 step, width 16": training_step(0.25),
    }
    if not options.quick:
        contenders["ResNet-18 step, width 64"] = training_step(1.0)
    repeats = {} if options.quick else REPEATS
    crowded = measure.busy()
    times = measure.in_turns(contenders, 1 if options.quick else 9, repeats)
    milliseconds = measure.show(times, "ms")
    median = {name: s["median"] for name, s in milliseconds.items()}
    result = {
        "what": f"batches of {BATCH}, {', '.join(AUGMENT)}, random bytes of CIFAR-10's shape",
        "milliseconds": milliseconds,
        "speedup": median["per sample"] / median["whole batch"],
        "share_of_step": {
            name.removeprefix("ResNet-18 step, "): median["whole batch"] / median[name]
            for name in times
            if name.startswith("ResNet-18")
        },
        "threads": options.threads,
    }
    measure.publish("data", result, options.out, crowded)


if __name__ == "__main__":
    main()
