import re

import pytest
import torch

from steppe.lab import Config, LabError, Sources, train
from steppe.lab.data import wrap
from steppe.lab.models import build
from steppe.lab.recipes import PAPER, RECIPES, recipe
from steppe.lab.reproduction import BATCHES, CIFAR, IMAGENET
from steppe.lab.specs import PAPER as METHODS
from steppe.lab.specs import parse
from steppe.lab.trainer import check_channels

COLUMNS = ("vgg16-bn", "resnet18", "wrn-28-10", "vit-s")
# rho, sigma, sigma of the mixed methods: the paper's settings, written out apart from the recipes
SETTINGS = {
    "cifar10-vgg16-bn": (0.05, 0.01, 0.015),
    "cifar10-resnet18": (0.1, 0.01, 0.015),
    "cifar10-wrn-28-10": (0.1, 0.01, 0.015),
    "cifar10-vit-s": (0.05, 0.001, 0.002),
    "cifar100-vgg16-bn": (0.1, 0.01, 0.015),
    "cifar100-resnet18": (0.2, 0.01, 0.015),
    "cifar100-wrn-28-10": (0.2, 0.01, 0.015),
    "cifar100-vit-s": (0.05, 0.001, 0.002),
    "imagenet-vgg16-bn": (0.05, 0.003, 0.005),
    "imagenet-resnet18": (0.05, 0.003, 0.005),
    "imagenet-resnet50": (0.05, 0.003, 0.005),
    "imagenet-vit-s32": (0.05, 0.005, 0.01),
}


def test_seventy_two_rows():
    assert set(SETTINGS) == set(PAPER)
    assert len(CIFAR) + len(IMAGENET) == 72
    keys = {recipe(cell.recipe, cell.method).experiment for cell in CIFAR + IMAGENET}
    assert len(keys) == 72
    assert len({recipe(cell.recipe, cell.method).experiment for cell in BATCHES}) == 4


@pytest.mark.parametrize("name", SETTINGS)
def test_strengths_are_the_papers(name):
    rho, sigma, mixed = SETTINGS[name]
    expected = {"sam": ("rho", rho), "rwp": ("sigma", sigma), "arwp": ("sigma", sigma)}
    expected |= {"m-rwp": ("sigma", mixed), "m-arwp": ("sigma", mixed), "sgd": None}
    for method in METHODS:
        config = recipe(name, method)
        spec = parse(config.method)
        assert spec.strength == expected[method]
        assert spec.shape == ("cosine" if method in ("rwp", "arwp") else "constant")
        if "arwp" in method:
            assert (spec.options["eta"], spec.options["beta"]) == (0.1, 0.99)
        if method[:2] == "m-":
            assert spec.options["lam"] == 0.5
        if method == "sam" and name.startswith("imagenet") and "vit" not in name:
            assert spec.options["m"] == 128


def test_training_settings_are_the_papers():
    for name in PAPER:
        config = recipe(name)
        vit = "vit" in name
        if name.startswith("cifar"):
            expected = (400, 256, "adam", 1e-4, 1e-4) if vit else (200, 256, "sgd", 0.1, 1e-3)
        else:
            expected = (300, 4096, "adamw", 3e-3, 0.3) if vit else (90, 256, "sgd", 0.1, 1e-4)
        found = (config.epochs, config.batch, config.optimizer, config.lr, config.weight_decay)
        assert found == expected
        assert config.schedule == "cosine"
        assert config.train_size is None
        assert config.width == 1
        assert re.match(r"cifar10-|cifar100-|imagenet-", name)
        assert name.startswith(config.data)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_every_method_and_its_options(name):
    for method in [*METHODS, "msam", "asam", "antithetic-rwp"]:
        assert recipe(name, method).recipe == name
    assert parse(recipe(name, "m-arwp:lam=.3").method).options["lam"] == 0.3


SHAPES = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "imagenet": (3, 224, 224)}
CLASSES = {"cifar100": 100, "imagenet": 1000}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_its_model_in_a_layout_that_torch_bears(name):
    config = recipe(name)
    side = int(config.data_options.get("downsample", 32))
    shape = SHAPES.get(config.data, (3, side, side))
    with torch.device("meta"):
        model = build(
            config.model,
            classes=CLASSES.get(config.data, 10),
            shape=shape,
            width=config.width,
            **config.model_options,
        )
    if config.channels_last:
        check_channels(model, torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) > 1000


def test_unknown():
    with pytest.raises(LabError, match="Did you mean cifar10-resnet18"):
        recipe("cifar10-resnet81")


FAMILIES = {
    "cifar10-vgg16-bn": (32, 0.125),
    "cifar10-resnet18": (32, 0.125),
    "cifar10-wrn-28-10": (32, 0.125),
    "cifar10-vit-s": (32, 0.125),
    "imagenet-resnet50": (96, 0.125),
    "imagenet-vit-s32": (96, 0.17),
    "digits-resnet": (8, 1.0),
    "digits-vit": (8, 1.0),
    "fashion-small": (28, 1.0),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_trains(name):
    """Two steps of the recipe itself, narrow and on few images."""
    size, width = FAMILIES[name]
    colours = 1 if name.startswith(("digits", "fashion")) else 3
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(256, (12, colours, size, size), generator=draws, dtype=torch.uint8)
    labels = torch.arange(12) % 10
    data = wrap((images[:8], labels[:8]), (images[8:], labels[8:]), classes=10)
    config = recipe(name, "m-arwp").replace(
        width=width,
        channels_last=name == "cifar10-resnet18",  # the others have too few channels when narrow
        steps=2,
        batch=4,
        warmup=0,
        train_size=None,
        label_noise=0,
        threads=1,
        workers=0,
    )
    assert isinstance(config, Config)

    def narrow():
        return build(
            config.model, classes=10, shape=data.shape, width=width, **config.model_options
        )

    result = train(config, sources=Sources(narrow, data), store=None, progress=False)
    assert result.status == "finished"
    assert result.steps == 2
