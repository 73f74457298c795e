"""The development settings on which `rise.py` chooses the default rise, and one training on each.

What is scored are samples of the training data that are not trained on, never test data. The loop is
a user's own: hooks, one backward for each batch, no call to steppe at the end.
"""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steppe
from steppe.analysis.changes import Change, Pruning, Rounding
from steppe.analysis.robustness import changed_weights
from steppe.lab import data, models
from steppe.methods import Method, Pass, mixed
from steppe.noise import Draw
from steppe.perturbations import Gaussian
from steppe.schedules import BASE, LEAST, Steering

CONTEXT, DIM, CHARACTERS = 32, 64, 96
LITTLE_TEXT, MUCH_TEXT, HELD_OUT = 2_000, 400_000, 20_000
PROBED = 2
"""So many seeds of a setting compare the meter with a direct measurement."""


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

    make: Callable[[int], Problem]
    steps: int
    batch: int
    seeds: int
    seconds: float
    task: str = "classification"

    @property
    def points(self) -> float:
        return 100.0 if self.task == "language" else 1.0


def images(
    name: str, net: str, train: int, held_out: int, wrong: float = 0.0, *, seed: int, **optim: float
) -> Problem:
    """`train` and `held_out` images of the training data, both drawn by the seed."""
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


@functools.cache
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


def digits(net: str, wrong: float, **optim: float) -> Callable[[int], Problem]:
    return lambda seed: images("digits", net, 400, 1000, wrong, seed=seed, **optim)


SGD, ADAM = {"lr": 0.1, "decay": 5e-4}, {"lr": 1e-3, "decay": 0.05, "adam": True}
SETTINGS = {
    "regression": Setting(regression, 400, 32, 20, 1, "regression"),
    "mlp-clean": Setting(digits("mlp", 0.0, **SGD), 600, 32, 20, 1),
    "mlp-wrong": Setting(digits("mlp", 0.2, **SGD), 600, 32, 20, 1),
    "lm-little": Setting(lambda seed: language(LITTLE_TEXT, seed), 300, 16, 5, 5, "language"),
    "lm-much": Setting(lambda seed: language(MUCH_TEXT, seed), 300, 16, 5, 5, "language"),
    "vit-clean": Setting(digits("small-vit", 0.0, **ADAM), 400, 32, 20, 10),
    "vit-wrong": Setting(digits("small-vit", 0.2, **ADAM), 400, 32, 20, 10),
    "resnet-clean": Setting(digits("small-resnet", 0.0, **SGD), 300, 32, 20, 5),
    "resnet-wrong": Setting(digits("small-resnet", 0.2, **SGD), 300, 32, 20, 5),
    "fashion": Setting(
        lambda seed: images(
            "fashion-mnist", "small-conv", 2000, 4000, seed=seed, lr=0.05, decay=5e-4
        ),
        *(775, 64, 10, 20),
    ),
    "cifar10": Setting(
        lambda seed: images("cifar10", "small-resnet", 5000, 4000, seed=seed, lr=0.1, decay=1e-3),
        *(1170, 128, 5, 60),
    ),
}


@dataclass(frozen=True)
class Run:
    """One training. `strength` is a rise, or msam's rho; `baseline` sees one batch a step, or two."""

    setting: str
    method: str
    strength: float
    power: int
    bound: float
    seed: int

    @property
    def batches(self) -> int:
        return 2 if self.method in ("m_rwp", "baseline, two") else 1

    @property
    def baseline(self) -> Run:
        name = "baseline, two" if self.batches == 2 else "baseline"
        return Run(self.setting, name, 0.0, 0, 0.0, self.seed)

    def build(self) -> Method | None:
        if self.method.startswith("baseline"):
            return None
        if self.method == "msam":
            return steppe.msam(self.strength)
        if self.method == "arwp":
            return steppe.arwp(rise=self.strength)
        kind = RampedRatio if self.method == "ramped ratio" else Steering
        noise = Tried(rise=self.strength, power=self.power, bound=self.bound, kind=kind)
        one = Method("rwp", (Pass(noise),))
        return mixed(one) if self.method == "m_rwp" else one


class RampedRatio(Steering):
    """The ramp alone: `rise` holds a fixed relative displacement."""

    def init(self, like: Tensor) -> Tensor:
        state = super().init(like)
        state[BASE] = self.asked(0)
        return state

    def update(self, state: Tensor, *learnt: Any) -> None:
        super().update(state, *learnt)
        state[BASE] = self.asked(0)
        state[-1] = (state[BASE] * self.ramp(state).sqrt()).clamp(min=LEAST)


@dataclass(frozen=True)
class Tried(Gaussian):
    """Gaussian noise whose ramp and bound are given."""

    power: int = 4
    bound: float = 0.5
    kind: type[Steering] = Steering

    @property
    def steering(self) -> Steering:
        assert self.rise is not None
        return self.kind(self.rise, self.bound, self.power)


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return F.mse_loss(output.flatten(), y)
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Per cent of accuracy or of variance explained; for language, minus the nats."""
    model.eval()
    output = torch.cat([model(part) for part in x.split(500)])
    model.train()
    if y.is_floating_point():
        return 100 * float(1 - loss_of(output, y) / y.var(correction=0))
    if y.ndim > 1:
        return -float(loss_of(output, y))
    return 100 * float((output.argmax(1) == y).float().mean())


def batches(problem: Problem, setting: Setting, run: Run) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each step its batches; all methods see the same first one."""
    step, epoch = 0, 0
    while step < setting.steps:
        orders = [
            data.epoch_order(
                *(problem.samples, setting.batch),
                **{"seed": run.seed, "epoch": epoch, "stream": stream, "drop_last": True},
            )
            for stream in range(run.batches)
        ]
        for parts in zip(*orders, strict=True):
            yield [problem.draw(i, data.mix(run.seed, step, k)) for k, i in enumerate(parts)]
            step += 1
            if step == setting.steps:
                return
        epoch += 1


class Look:
    """What the steering does, read while training runs."""

    def __init__(self, run: Run, steps: int, perturber: steppe.Perturber | None) -> None:
        self.run, self.steps, self.perturber = run, steps, perturber
        self.memory: Tensor | None = None
        self.measured: list[float] = []
        self.probes: list[tuple[float, float, float]] = []
        self.highest = 0.0
        if perturber is not None and perturber.method.steered:
            (state,) = perturber.state_dict()["states"]
            self.memory = state["steering"][0]

    def after(self, step: int, closure: Callable[[], Tensor]) -> None:
        if self.memory is None or self.perturber is None:
            return
        self.highest = max(self.highest, float(self.memory[BASE]))
        if step > 2 * self.steps / 3 and step % 10 == 0:
            self.measured.append(self.perturber.stats()["measured_rise"])
        if self.run.seed % 1000 < PROBED and step in (self.steps // 2, self.steps - 1):
            stats, probe = self.perturber.stats(), self.perturber.probe(closure, samples=16)
            self.probes.append((probe.rise, probe.stderr, stats["measured_rise"]))

    def line(self) -> dict[str, Any]:
        if self.memory is None or self.perturber is None:
            return {}
        stats = self.perturber.stats()
        found = {"measured": sum(self.measured) / len(self.measured), "highest": self.highest}
        return {**found, "ratio": stats["ratio"], "ramp": stats["ramp"], "probes": self.probes}


def train(run: Run, steps: int | None = None) -> dict[str, Any]:
    """The run's line: what the model is worth as the loop leaves it, and after rounding and pruning."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    begin, setting = time.perf_counter(), SETTINGS[run.setting]
    setting = setting if steps is None else replace(setting, steps=steps)
    problem = setting.make(run.seed)
    model, optimizer = problem.model, problem.optimizer
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)
    method = run.build()
    perturber = method and steppe.attach(model, optimizer, method, seed=run.seed)
    look = Look(run, setting.steps, perturber)
    many = torch.arange(min(problem.samples, 400))
    probed = many.split(setting.batch)[:4]  # in training mode BatchNorm depends on a batch's size
    if run.method == "no rest" and perturber is not None:
        perturber._training.rests = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, parts in enumerate(batches(problem, setting, run)):
            for x, y in parts:
                (loss_of(model(x), y) / run.batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            decay.step()

            def closure() -> Tensor:
                drawn = (problem.draw(i, 0) for i in probed)
                return torch.stack([loss_of(model(x), y) for x, y in drawn]).mean()

            look.after(step, closure)
    if perturber is not None:
        perturber.detach()
    return {
        **asdict(run),
        "score": score(model, *problem.held_out),
        "train": score(model, *problem.draw(many, None)),
        "two_bits": score(changed(problem, Rounding(2)), *problem.held_out),
        "pruned": score(changed(problem, Pruning(0.8)), *problem.held_out),
        **look.line(),
        "warned": sorted({str(w.message)[:60] for w in caught}),
        "steps": setting.steps,
        "seconds": round(time.perf_counter() - begin, 2),
        "torch": torch.__version__,
        "simd": torch.backends.cpu.get_cpu_capability(),
    }


@torch.no_grad()
def changed(problem: Problem, change: Change) -> nn.Module:
    """A copy with changed weights, and BatchNorm statistics of training batches that fit them."""
    model = copy.deepcopy(problem.model)
    params = [model.get_parameter(name) for name in changed_weights(model)]
    for p, value in zip(params, change.weights(params, Draw(0, 0)), strict=True):
        p.copy_(value)
    if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        samples = torch.arange(min(problem.samples, 1024)).split(128)
        steppe.recompute_norm_stats(model, [problem.draw(i, 1) for i in samples])
    return model
