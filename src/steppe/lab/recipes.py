"""Recipes: the complete config of a run, by name and method.

The paper's settings (sections 5.1 to 5.3 and the appendix), with all six methods; where the paper
is silent, the recipe's line says what is ours. And settings that two cores carry in seconds or
minutes, whose numbers are not the paper's. What a recipe does not name is as in `Config`: SGD with
learning rate 0.1, momentum 0.9, weight decay 5e-4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steppe.lab.config import Config
from steppe.lab.errors import looked_up
from steppe.lab.specs import adapted, parse


@dataclass(frozen=True)
class Recipe:
    """A function from a method (its name, or a spec whose options come first) to the config."""

    about: str
    config: Config
    strengths: Mapping[str, str] = field(default_factory=dict)
    """Methods with the options that they have here."""

    def __call__(self, method: str = "sgd") -> Config:
        spec = parse(method)
        known = self.strengths.get(spec.name)
        return (adapted(parse(known), spec) if known else spec).apply(self.config)


def strengths(rho: float, sigma: float, mixed: float, **sam: int) -> dict[str, str]:
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


def _on_cifar(data: str, shown: str, rhos: tuple[float, float, float]) -> dict[str, Recipe]:
    """The recipes on one of the two, with SAM's rho for each of the convolution nets."""
    config = Config(
        data=data,
        epochs=200,
        batch=256,
        weight_decay=1e-3,
        augment=("flip", "crop:padding=4", "cutout:size=16,probability=0.5"),
        channels_last=True,
    )
    nets = {"vgg16-bn": "VGG16-BN", "resnet18": "ResNet-18", "wrn-28-10": "WRN-28-10"}
    found = {
        f"{data}-{model}": Recipe(
            f"{name} on {shown}", config.replace(model=model), strengths(rho, 0.01, 0.015)
        )
        for (model, name), rho in zip(nets.items(), rhos, strict=True)
    }
    vit = config.replace(
        model="vit-s",
        epochs=400,
        optimizer="adam",
        lr=1e-4,
        weight_decay=1e-4,
        augment=("randaugment:count=2,magnitude=14", "crop:padding=4", "flip"),
        channels_last=False,
    )
    ours = "weight decay and RandAugment's two numbers are the released code's"
    found[f"{data}-vit-s"] = Recipe(f"ViT-S on {shown}; {ours}", vit, strengths(0.05, 0.001, 0.002))
    return found


def _on_imagenet() -> dict[str, Recipe]:
    config = Config(
        data="imagenet",
        epochs=90,
        batch=256,
        weight_decay=1e-4,
        augment=("resized-crop", "flip"),
        channels_last=True,
        workers=8,
    )
    nets = {"vgg16-bn": "VGG16-BN", "resnet18": "ResNet-18", "resnet50": "ResNet-50"}
    found = {
        f"imagenet-{model}": Recipe(
            f"{name} on ImageNet", config.replace(model=model), strengths(0.05, 0.003, 0.005, m=128)
        )
        for model, name in nets.items()
    }
    found["imagenet-vit-s32"] = Recipe(
        "ViT-S/32 on ImageNet; learning rate 3e-3 and 10,000 warm-up steps are ours (customary)",
        config.replace(
            model="vit-s",
            epochs=300,
            batch=4096,
            optimizer="adamw",
            lr=3e-3,
            warmup=10_000,
            weight_decay=0.3,
            channels_last=False,
        ),
        strengths(0.05, 0.005, 0.01),
    )
    return found


PAPER = {
    **_on_cifar("cifar10", "CIFAR-10", (0.05, 0.1, 0.1)),
    **_on_cifar("cifar100", "CIFAR-100", (0.1, 0.2, 0.2)),
    **_on_imagenet(),
}
"""The paper's twelve columns; with six methods each, the 72 rows of its Tables 2 and 3. The
ablation over batches is cifar100-resnet18's."""

DIGITS = Config(
    steps=600,
    batch=32,
    train_size=400,
    label_noise=0.2,
    data_seed=None,
    eval_every=10,
    threads=1,
)
CIFAR_SMALL = Config(
    data="cifar10",
    model="resnet18",
    width=0.25,
    epochs=80,
    drop_last=True,  # else BatchNorm and an lr of 0.1 meet 8 samples once an epoch
    weight_decay=1e-3,
    train_size=5000,
    augment=("flip", "crop"),
    data_options={"downsample": 16},
    channels_last=True,
    eval_every=10,
)
FASHION_SMALL = Config(
    data="fashion-mnist",
    model="small-conv",
    epochs=40,
    batch=64,
    drop_last=True,
    lr=0.05,
    train_size=2000,
    augment=("flip", "crop"),
    eval_every=10,
)
VIT = {"model": "small-vit", "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05}

SMALL = {
    "digits": Recipe(
        "Digits, 400 images with 20 % label noise, MLP: a second or two a run. What `make demo` runs",
        DIGITS,
    ),
    "digits-clean": Recipe(
        "Digits, 400 images with clean labels, MLP: there is little to gain here",
        DIGITS.replace(label_noise=0.0),
    ),
    "digits-resnet": Recipe(
        "Digits, 400 images with 20 % label noise, small BatchNorm ResNet: about ten seconds a run",
        DIGITS.replace(model="small-resnet", recompute_norm=True, channels_last=True),
    ),
    "digits-vit": Recipe(
        "Digits, 400 images with 20 % label noise, small ViT with AdamW",
        DIGITS.replace(**VIT, steps=500),
    ),
    "cifar10-small": Recipe(
        "CIFAR-10 at CPU size: 5,000 images at 16x16, ResNet-18 of a quarter width; minutes a run",
        CIFAR_SMALL,
    ),
    "cifar100-small": Recipe(
        "CIFAR-100 at CPU size: 10,000 images at 16x16, ResNet-18 of a quarter width",
        CIFAR_SMALL.replace(data="cifar100", train_size=10_000),
    ),
    "fashion-small": Recipe("Fashion-MNIST, 2,000 images, small convolution net", FASHION_SMALL),
    "fashion-small-vit": Recipe(
        "Fashion-MNIST, 2,000 images, small ViT with AdamW", FASHION_SMALL.replace(**VIT)
    ),
}

RECIPES: dict[str, Recipe] = {**PAPER, **SMALL}


def recipe(name: str, method: str = "sgd") -> Config:
    """The config of a recipe for a method.

    >>> recipe("cifar10-resnet18", "arwp:eta=1").method
    'arwp:sigma=0.01,eta=1,beta=0.99'
    """
    return looked_up("recipe", name, RECIPES)(method).replace(recipe=name)
