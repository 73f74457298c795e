"""Recipes: one function per data set and model, each returning a complete config.

The paper's settings (sections 5.1 to 5.3 and the appendix), with all six methods. Where the
paper is silent the docstring says what is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from steppe.lab.config import Config
from steppe.lab.errors import unknown
from steppe.lab.small_recipes import SMALL
from steppe.lab.specs import adapted, parse

Recipe = Callable[[str], Config]
"""From a method (its name, or a spec whose options override the recipe's) to the config."""

CIFAR = Config(
    epochs=200,
    batch=256,
    lr=0.1,
    momentum=0.9,
    weight_decay=1e-3,
    augment=("flip", "crop:padding=4", "cutout:size=16,probability=0.5"),
    channels_last=True,
)
IMAGENET = Config(
    data="imagenet",
    epochs=90,
    batch=256,
    lr=0.1,
    momentum=0.9,
    weight_decay=1e-4,
    augment=("resized-crop", "flip"),
    channels_last=True,
    workers=8,
)


def strengths(*, rho: float, sigma: float, mixed: float, **sam: int) -> dict[str, str]:
    """The paper's strengths: rho of SAM, sigma of RWP and ARWP (rising), of m-RWP and m-ARWP."""
    parts = "".join(f",{name}={value}" for name, value in sam.items())
    return {
        "sgd": "sgd",
        "sam": f"sam:rho={rho}{parts}",
        "rwp": f"rwp:sigma={sigma}",
        "arwp": f"arwp:sigma={sigma},eta=0.1,beta=0.99",
        "m-rwp": f"m-rwp:sigma={mixed},lam=0.5",
        "m-arwp": f"m-arwp:sigma={mixed},lam=0.5,eta=0.1,beta=0.99",
    }


def complete(config: Config, settings: Mapping[str, str], method: str) -> Config:
    """The config for a method, with this recipe's strength unless the method brings its own."""
    spec = parse(method)
    known = settings.get(spec.name)
    return (adapted(parse(known), spec) if known else spec).apply(config)


def cifar10_vgg16_bn(method: str = "sgd") -> Config:
    """VGG16-BN on CIFAR-10."""
    config = CIFAR.replace(data="cifar10", model="vgg16-bn")
    return complete(config, strengths(rho=0.05, sigma=0.01, mixed=0.015), method)


def cifar10_resnet18(method: str = "sgd") -> Config:
    """ResNet-18 on CIFAR-10."""
    config = CIFAR.replace(data="cifar10", model="resnet18")
    return complete(config, strengths(rho=0.1, sigma=0.01, mixed=0.015), method)


def cifar10_wrn_28_10(method: str = "sgd") -> Config:
    """WRN-28-10 on CIFAR-10."""
    config = CIFAR.replace(data="cifar10", model="wrn-28-10")
    return complete(config, strengths(rho=0.1, sigma=0.01, mixed=0.015), method)


def cifar10_vit_s(method: str = "sgd") -> Config:
    """ViT-S on CIFAR-10; weight decay and RandAugment's two numbers are the released code's."""
    return complete(_vit(CIFAR.replace(data="cifar10")), VIT_STRENGTHS, method)


def cifar100_vgg16_bn(method: str = "sgd") -> Config:
    """VGG16-BN on CIFAR-100."""
    config = CIFAR.replace(data="cifar100", model="vgg16-bn")
    return complete(config, strengths(rho=0.1, sigma=0.01, mixed=0.015), method)


def cifar100_resnet18(method: str = "sgd") -> Config:
    """ResNet-18 on CIFAR-100; also the recipe of the batch ablation."""
    config = CIFAR.replace(data="cifar100", model="resnet18")
    return complete(config, strengths(rho=0.2, sigma=0.01, mixed=0.015), method)


def cifar100_wrn_28_10(method: str = "sgd") -> Config:
    """WRN-28-10 on CIFAR-100."""
    config = CIFAR.replace(data="cifar100", model="wrn-28-10")
    return complete(config, strengths(rho=0.2, sigma=0.01, mixed=0.015), method)


def cifar100_vit_s(method: str = "sgd") -> Config:
    """ViT-S on CIFAR-100; weight decay and RandAugment's two numbers are the released code's."""
    return complete(_vit(CIFAR.replace(data="cifar100")), VIT_STRENGTHS, method)


VIT_STRENGTHS = strengths(rho=0.05, sigma=0.001, mixed=0.002)


def _vit(config: Config) -> Config:
    return config.replace(
        model="vit-s",
        epochs=400,
        optimizer="adam",
        lr=1e-4,
        weight_decay=1e-4,
        augment=("randaugment:count=2,magnitude=14", "crop:padding=4", "flip"),
        channels_last=False,
    )


IMAGENET_STRENGTHS = strengths(rho=0.05, sigma=0.003, mixed=0.005, m=128)


def imagenet_vgg16_bn(method: str = "sgd") -> Config:
    """VGG16-BN on ImageNet."""
    return complete(IMAGENET.replace(model="vgg16-bn"), IMAGENET_STRENGTHS, method)


def imagenet_resnet18(method: str = "sgd") -> Config:
    """ResNet-18 on ImageNet."""
    return complete(IMAGENET.replace(model="resnet18"), IMAGENET_STRENGTHS, method)


def imagenet_resnet50(method: str = "sgd") -> Config:
    """ResNet-50 on ImageNet."""
    return complete(IMAGENET.replace(model="resnet50"), IMAGENET_STRENGTHS, method)


def imagenet_vit_s32(method: str = "sgd") -> Config:
    """ViT-S/32 on ImageNet; learning rate 3e-3 and 10,000 warm-up steps are ours (customary)."""
    config = IMAGENET.replace(
        model="vit-s",
        epochs=300,
        batch=4096,
        optimizer="adamw",
        lr=3e-3,
        warmup=10_000,
        weight_decay=0.3,
        channels_last=False,
    )
    return complete(config, strengths(rho=0.05, sigma=0.005, mixed=0.01), method)


PAPER: dict[str, Recipe] = {
    "cifar10-vgg16-bn": cifar10_vgg16_bn,
    "cifar10-resnet18": cifar10_resnet18,
    "cifar10-wrn-28-10": cifar10_wrn_28_10,
    "cifar10-vit-s": cifar10_vit_s,
    "cifar100-vgg16-bn": cifar100_vgg16_bn,
    "cifar100-resnet18": cifar100_resnet18,
    "cifar100-wrn-28-10": cifar100_wrn_28_10,
    "cifar100-vit-s": cifar100_vit_s,
    "imagenet-vgg16-bn": imagenet_vgg16_bn,
    "imagenet-resnet18": imagenet_resnet18,
    "imagenet-resnet50": imagenet_resnet50,
    "imagenet-vit-s32": imagenet_vit_s32,
}
"""The paper's twelve columns; with six methods each, the 72 rows of its Tables 2 and 3."""

RECIPES: dict[str, Recipe] = {**PAPER, **SMALL}


def recipe(name: str, method: str = "sgd") -> Config:
    """The config of a recipe for a method.

    >>> recipe("cifar10-resnet18", "arwp:eta=1").method
    'arwp:sigma=0.01,eta=1,beta=0.99'
    """
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name](method).replace(recipe=name)
