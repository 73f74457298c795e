"""Networks by name, in a CIFAR and an ImageNet form chosen by the shape of the images."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from steppe.lab.models.foreign import foreign
from steppe.lab.models.resnet import resnet18, resnet34, resnet50, small_resnet
from steppe.lab.models.small import mlp, small_conv
from steppe.lab.models.vgg import vgg16_bn
from steppe.lab.models.vit import ViT, small_vit
from steppe.lab.models.wrn import wide_resnet
from steppe.lab.naming import check_options, unknown

__all__ = ["build", "names"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "small-conv": small_conv,
    "small-resnet": small_resnet,
    "small-vit": small_vit,
    "vgg16-bn": vgg16_bn,
    "vit-s": ViT,
    "wrn-28-10": partial(wide_resnet, depth=28, widen=10),
}


def names() -> list[str]:
    """The networks that `build` knows by name; any other wrn-DEPTH-WIDTH works as well."""
    return sorted(MODELS)


def build(
    name: str, *, classes: int, shape: tuple[int, ...], width: float = 1.0, **options: Any
) -> nn.Module:
    """The network of this name with `classes` outputs, for inputs of `shape`.

    Images up to 64x64 get CIFAR's form of a network (3x3 stem, no pooling in it), larger ones
    ImageNet's. `width` multiplies the channels of every layer. Initial weights are drawn from
    torch's global generator: seed it for a repeatable network. Besides `names()`:
    `torchvision:NAME`, `timm:NAME`, and `module:function` of the user's.

    >>> model = build("resnet18", classes=10, shape=(3, 32, 32))
    >>> sum(p.numel() for p in model.parameters())
    11173962
    """
    if classes < 1:
        raise ValueError(f"{name}: classes must be at least 1, got {classes}.")
    if ":" in name:
        return foreign(name, classes=classes, shape=shape, width=width, **options)
    wide = re.fullmatch(r"wrn-(\d+)-(\d+)", name)
    model = MODELS.get(name)
    if wide:
        model = partial(wide_resnet, depth=int(wide[1]), widen=int(wide[2]))
    if model is None:
        raise unknown("model", name, names())
    check_options(name, model, options)
    return model(classes, shape, width, **options)
