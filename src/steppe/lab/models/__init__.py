"""Networks by name, in a CIFAR and an ImageNet form chosen by the shape of the images."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from steppe.lab.models.plain import mlp, small_conv, vgg16_bn
from steppe.lab.models.resnet import resnet18, resnet34, resnet50, small_resnet, wide_resnet
from steppe.lab.models.vit import ViT, small_vit
from steppe.lab.naming import check_options, library, unknown, user_function

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
    source, colon, rest = name.partition(":")
    if source in ("torchvision", "timm"):
        if width != 1:
            raise ValueError(f"{name} has no width multiplier, got width={width}.")
        if source == "torchvision":
            return from_torchvision(rest, classes=classes, shape=shape, **options)
        create = library("timm").create_model
        return create(rest, num_classes=classes, in_chans=shape[0], **options)  # type: ignore[no-any-return]
    if colon:
        return from_user(name, classes=classes, shape=shape, width=width, **options)
    model = MODELS.get(name)
    if wide := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        model = partial(wide_resnet, depth=int(wide[1]), widen=int(wide[2]))
    if model is None:
        raise unknown("model", name, names())
    check_options(name, model, options)
    return model(classes, shape, width, **options)


def from_torchvision(
    name: str, *, classes: int, shape: tuple[int, ...], **options: Any
) -> nn.Module:
    """torchvision's classification network; most of them take ImageNet-sized colour images."""
    if len(shape) != 3 or shape[0] != 3:
        raise ValueError(f"torchvision:{name} takes images with 3 channels, got shape {shape}.")
    models = library("torchvision.models")
    constructor = getattr(models, name, None)
    if not inspect.isfunction(constructor):
        found = [k for k, v in vars(models).items() if inspect.isfunction(v) and k[0] != "_"]
        raise unknown("network of torchvision.models", name, found)
    return constructor(num_classes=classes, **options)  # type: ignore[no-any-return]


def from_user(name: str, **arguments: Any) -> nn.Module:
    """What `module:function` returns, called with those of `classes`, `shape` and `width` that
    it takes, and with every option."""
    function = user_function(name)
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if arguments["width"] == 1 and "width" not in parameters:
        del arguments["width"]
    for known in ("classes", "shape"):
        if known not in parameters and not anything:
            del arguments[known]
    refused = [] if anything else [key for key in arguments if key not in parameters]
    if refused:
        raise ValueError(
            f"{name} takes {', '.join(parameters) or 'no arguments'}, but was given {', '.join(refused)}."
        )
    model = function(**arguments)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must return a torch.nn.Module, got {type(model).__name__}.")
    return model
