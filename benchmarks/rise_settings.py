"""The development settings on which `rise.py` chooses the default rise.

What is scored are samples of the training data that are not trained on, never test data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steppe.lab import data, models

sys.path.append(str(Path(__file__).parents[1]))  # where studies and examples are

SIZES = {"digits": (400, 1000), "fashion-mnist": (2000, 4000), "cifar10": (5000, 4000)}
"""Images to train on and to score."""
CONTEXT, DIM, CHARACTERS = 32, 64, 96
LITTLE_TEXT, MUCH_TEXT, HELD_OUT = 2_000, 400_000, 20_000


class Problem(NamedTuple):
    """What is trained, batches by the numbers of their samples, and the samples that are scored."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    samples: int
    draw: Callable[[Tensor, int | None], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """`seconds`: roughly what a run of a one-pass method takes, cheapest first. `points`: of the rule,
    for one unit of the score (accuracy and 100 R² count as they are, a hundredth of a nat as a point)."""

    make: Callable[..., Problem]
    steps: int
    batch: int
    seeds: int
    seconds: float
    task: str = "classification"

    @property
    def points(self) -> float:
        return 100.0 if self.task == "language" else 1.0


def images(name: str, net: str, wrong: float = 0.0, *, seed: int, **optim: float) -> Problem:
    """Images to train on and to score, of the training data, both drawn by the seed."""
    train, held_out = SIZES[name]
    if name == "digits":
        # 1,400 of 1,797 in an order that no seed changes: the rest is left alone
        whole = data.load("digits", train_size=1400, seed=0).train
    else:
        options: dict[str, Any] = {"downsample": 16} if name == "cifar10" else {}
        whole = data.load(name, augment=("flip", "crop"), **options).train
    order = torch.randperm(len(whole), generator=data.generator("rise", seed))
    own, rest = whole.subset(order[:train]), whole.subset(order[train : train + held_out])
    labels = own.targets
    if wrong:
        draws = data.generator("wrong", seed)
        chosen = torch.rand(train, generator=draws) < wrong
        labels = torch.where(
            chosen, (labels + torch.randint(1, 10, (train,), generator=draws)) % 10, labels
        )
    own = own.relabelled(labels)
    x, y = rest.load(torch.arange(held_out), None)
    model = models.build(net, classes=10, shape=tuple(x.shape[1:]))
    if x.ndim == 4 and net != "small-vit":
        model = model.to(memory_format=torch.channels_last)
    return Problem(model, optimizer_of(model, **optim), train, own.load, (x, y))


def optimizer_of(
    model: nn.Module, lr: float, decay: float, adam: bool = False
) -> torch.optim.Optimizer:
    if adam:
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)


def regression(seed: int) -> Problem:
    """150 patients to train on, 192 to score, of the 342 that no seed changes."""
    whole = data.load("diabetes", train_size=342, seed=0).train
    order = torch.randperm(342, generator=data.generator("rise", seed))
    own, rest = whole.subset(order[:150]), whole.subset(order[150:])
    model = models.build("mlp", classes=1, shape=(10,), hidden=(64, 64))
    held_out = rest.load(torch.arange(len(rest)), None)
    return Problem(model, optimizer_of(model, 0.02, 5e-4), 150, own.load, held_out)


class LanguageModel(nn.Module):
    """Predicts each next character; the output layer is the embedding."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, DIM)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, DIM))
        layer = nn.TransformerEncoderLayer(
            DIM, 4, 2 * DIM, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(DIM), False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.embedding(x) + self.positions, mask=self.mask, is_causal=True)
        return x @ self.embedding.weight.T


@cache
def text() -> Tensor:
    """The language reference that every Python carries for `help()`: printable ASCII as 1 to 95."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([ord(c) - 31 if " " <= c <= "~" else 0 for c in whole])


def language(size: int, seed: int) -> Problem:
    """A stretch of the text to train on, and the 20,000 characters that follow it to score."""

    def draw(start: Tensor, _: int | None) -> tuple[Tensor, Tensor]:
        window = text()[start[:, None] + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, 1:]

    model = LanguageModel()
    held_out = draw(torch.arange(size, size + HELD_OUT - CONTEXT, CONTEXT), None)
    return Problem(
        model, optimizer_of(model, 3e-3, 0.05, adam=True), size - CONTEXT, draw, held_out
    )


class Finetuned(nn.Module):
    """A pretrained MiniLM and a linear layer, on texts alone: what is not padding is attended to."""

    def __init__(self, folder: Path) -> None:
        from examples.finetune import Classifier

        super().__init__()
        self.classifier = Classifier(folder, lora=False)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.classifier(ids, (ids != 0).long())
        return scores


@cache
def reviews() -> Any:
    """The texts of the fine-tuning study; their archive is in the folder of data sets."""
    from studies.finetune import Data

    return Data(data.default_root())


def minilm(seed: int) -> Problem:
    """200 reviews to train on; scored are the study's validation texts, never its test texts."""
    from studies.finetune import Run

    texts = reviews()
    own, rest = texts.training(Run("full", 200, 0.0, "", 0.0, seed)), texts.validation

    def draw(index: Tensor, _: int | None) -> tuple[Tensor, Tensor]:
        longest = int(own.mask[index].sum(1).max())
        return own.ids[index, :longest], own.labels[index]

    model = Finetuned(texts.folder)
    held_out = (rest.ids, rest.labels)
    return Problem(model, optimizer_of(model, 1e-4, 0.01, adam=True), 200, draw, held_out)


SGD, ADAM = {"lr": 0.1, "decay": 5e-4}, {"lr": 1e-3, "decay": 0.05, "adam": True}
FASHION, CIFAR = {"lr": 0.05, "decay": 5e-4}, {"lr": 0.1, "decay": 1e-3}
SETTINGS = {
    "regression": Setting(regression, 400, 32, 20, 1, "regression"),
    "mlp-clean": Setting(partial(images, "digits", "mlp", **SGD), 600, 32, 20, 1),
    "mlp-wrong": Setting(partial(images, "digits", "mlp", 0.2, **SGD), 600, 32, 20, 1),
    "lm-little": Setting(partial(language, LITTLE_TEXT), 300, 16, 5, 5, "language"),
    "lm-much": Setting(partial(language, MUCH_TEXT), 300, 16, 5, 5, "language"),
    "vit-clean": Setting(partial(images, "digits", "small-vit", **ADAM), 400, 32, 20, 10),
    "vit-wrong": Setting(partial(images, "digits", "small-vit", 0.2, **ADAM), 400, 32, 20, 10),
    "resnet-clean": Setting(partial(images, "digits", "small-resnet", **SGD), 300, 32, 20, 5),
    "resnet-wrong": Setting(partial(images, "digits", "small-resnet", 0.2, **SGD), 300, 32, 20, 5),
    "fashion": Setting(partial(images, "fashion-mnist", "small-conv", **FASHION), 775, 64, 10, 20),
    "minilm": Setting(minilm, 80, 20, 5, 15),
    "cifar10": Setting(partial(images, "cifar10", "small-resnet", **CIFAR), 1170, 128, 5, 60),
}
