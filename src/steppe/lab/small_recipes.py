"""Recipes that two cores carry in seconds or minutes. Their numbers are not the paper's."""

from __future__ import annotations

from collections.abc import Callable

from steppe.lab.config import Config
from steppe.lab.specs import parse

DIGITS = Config(
    data="digits",
    model="mlp",
    steps=600,
    batch=32,
    lr=0.1,
    weight_decay=5e-4,
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
    batch=128,
    drop_last=True,  # else BatchNorm and an lr of 0.1 meet 8 samples once an epoch
    lr=0.1,
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


def digits(method: str = "sgd") -> Config:
    """Digits, 400 images with 20 % label noise, MLP: a second or two a run. What `make demo` runs."""
    return parse(method).apply(DIGITS)


def digits_clean(method: str = "sgd") -> Config:
    """Digits, 400 images with clean labels, MLP: there is little to gain here."""
    return parse(method).apply(DIGITS.replace(label_noise=0.0))


def digits_resnet(method: str = "sgd") -> Config:
    """Digits, 400 images with 20 % label noise, small BatchNorm ResNet: about ten seconds a run."""
    config = DIGITS.replace(model="small-resnet", recompute_norm=True, channels_last=True)
    return parse(method).apply(config)


def digits_vit(method: str = "sgd") -> Config:
    """Digits, 400 images with 20 % label noise, small ViT with AdamW."""
    config = DIGITS.replace(
        model="small-vit", optimizer="adamw", lr=1e-3, weight_decay=0.05, steps=500
    )
    return parse(method).apply(config)


def cifar10_small(method: str = "sgd") -> Config:
    """CIFAR-10 at CPU size: 5,000 images at 16x16, ResNet-18 of a quarter width; minutes a run."""
    return parse(method).apply(CIFAR_SMALL)


def cifar10_small_vgg16_bn(method: str = "sgd") -> Config:
    """CIFAR-10 at CPU size with VGG16-BN of a quarter width."""
    return parse(method).apply(CIFAR_SMALL.replace(model="vgg16-bn"))


def cifar10_small_wrn(method: str = "sgd") -> Config:
    """CIFAR-10 at CPU size with WRN-16-2."""
    return parse(method).apply(CIFAR_SMALL.replace(model="wrn-16-2", width=1.0))


def cifar10_small_vit(method: str = "sgd") -> Config:
    """CIFAR-10 at CPU size with a small ViT and Adam."""
    config = CIFAR_SMALL.replace(
        model="small-vit",
        width=1.0,
        optimizer="adam",
        lr=1e-3,
        weight_decay=1e-4,
        channels_last=False,
    )
    return parse(method).apply(config)


def cifar100_small(method: str = "sgd") -> Config:
    """CIFAR-100 at CPU size: 10,000 images at 16x16, ResNet-18 of a quarter width."""
    return parse(method).apply(CIFAR_SMALL.replace(data="cifar100", train_size=10_000))


def fashion_small(method: str = "sgd") -> Config:
    """Fashion-MNIST, 2,000 images, small convolution net."""
    return parse(method).apply(FASHION_SMALL)


def fashion_small_vit(method: str = "sgd") -> Config:
    """Fashion-MNIST, 2,000 images, small ViT with AdamW."""
    config = FASHION_SMALL.replace(model="small-vit", optimizer="adamw", lr=1e-3, weight_decay=0.05)
    return parse(method).apply(config)


SMALL: dict[str, Callable[[str], Config]] = {
    "digits": digits,
    "digits-clean": digits_clean,
    "digits-resnet": digits_resnet,
    "digits-vit": digits_vit,
    "cifar10-small": cifar10_small,
    "cifar10-small-vgg16-bn": cifar10_small_vgg16_bn,
    "cifar10-small-wrn": cifar10_small_wrn,
    "cifar10-small-vit": cifar10_small_vit,
    "cifar100-small": cifar100_small,
    "fashion-small": fashion_small,
    "fashion-small-vit": fashion_small_vit,
}
