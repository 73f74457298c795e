"""Networks from elsewhere: torchvision's, timm's, the user's own."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from steppe.lab.naming import library, unknown, user_function


def foreign(
    name: str, *, classes: int, shape: tuple[int, ...], width: float, **options: Any
) -> nn.Module:
    """The network behind `torchvision:NAME`, `timm:NAME` or `module:function`."""
    source, _, rest = name.partition(":")
    if source in ("torchvision", "timm"):
        if width != 1:
            raise ValueError(f"{name} has no width multiplier, got width={width}.")
        build = from_torchvision if source == "torchvision" else from_timm
        return build(rest, classes=classes, shape=shape, **options)
    return from_user(name, classes=classes, shape=shape, width=width, **options)


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


def from_timm(name: str, *, classes: int, shape: tuple[int, ...], **options: Any) -> nn.Module:
    """timm's network with this number of classes and input channels."""
    timm = library("timm")
    return timm.create_model(name, num_classes=classes, in_chans=shape[0], **options)  # type: ignore[no-any-return]


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
