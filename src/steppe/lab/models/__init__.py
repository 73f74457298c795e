"""Networks by name, in a CIFAR and an ImageNet form chosen by the shape of the images."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from steppe.lab.models.mlp import mlp
from steppe.lab.models.resnet import resnet18, resnet34, resnet50, small_resnet

__all__ = ["build", "names"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "small-resnet": small_resnet,
}


def names() -> list[str]:
    """The networks that `build` knows by name."""
    return sorted(MODELS)


def build(
    name: str, *, classes: int, shape: tuple[int, ...], width: float = 1.0, **options: Any
) -> nn.Module:
    """The network of this name, freshly initialised from torch's global generator."""
    if name not in MODELS:
        near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4) or names()
        raise ValueError(f"No model is called {name!r}. Did you mean {', '.join(near)}?")
    return MODELS[name](classes, shape, width, **options)
