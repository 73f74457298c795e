"""The studies: what is trained, by which methods and controls, on how many seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from steppe.lab import specs
from steppe.lab.config import Config
from steppe.lab.errors import unknown
from steppe.lab.recipes import recipe
from steppe.lab.specs import label, parse
from steppe.lab.tuning import Tune

METHODS = ("sgd", "sam", "rwp", "arwp", "m-rwp", "m-arwp", "msam")
RANDOM = ("rwp", "arwp", "m-rwp", "m-arwp")
"""The methods whose default strength the primary questions are about."""
FEW = ("sgd", "sam", "arwp", "m-arwp")
LARGE = (specs.LARGE, f"m-{specs.LARGE}")
"""The setting for compression, shown beside the default wherever robustness is."""
NARROW = "ResNet-18 of a quarter width"
LENGTHS = (0.25, 0.5, 2.0)
"""Of the usual number of steps."""

RATIOS = (0.15, 0.3, 0.45, 0.6, 0.9, 1.2)
"""Figures 2 and 3: six strengths of RWP and m-RWP."""


@dataclass(frozen=True)
class Control:
    """A method with one thing changed, and what that is called."""

    name: str
    method: str
    batch: int = 1
    """Times the usual batch, in as many steps."""
    steps: int = 1
    """Times the usual steps."""
    options: Mapping[str, bool] = field(default_factory=dict)


CONTROLS = (
    Control("SGD, batch doubled", "sgd", batch=2),
    Control("ARWP, batch doubled", "arwp", batch=2),
    Control("SGD, steps doubled", "sgd", steps=2),
    Control("ARWP, steps doubled", "arwp", steps=2),
    Control("SAM, two batches", "sam", options={"same_batch": False}),
    Control("m-ARWP, one batch", "m-arwp", options={"same_batch": True}),
)
"""A method with two passes over two batches sees twice the data at twice the cost: the first four
give one-pass methods the same data or the same FLOPs. The last two are the batch ablation."""

Sweeps = Mapping[str, tuple[str, Mapping[str, tuple[float, ...]]]]
SWEEPS: Sweeps = {
    "strength of RWP": ("rwp", {"ratio": RATIOS}),
    "strength of m-RWP": ("m-rwp", {"ratio": RATIOS}),
    "eta and exponent": ("arwp", {"eta": (0.01, 0.1, 1, 10, 100), "exponent": (0.25, 0.5)}),
    "eta and beta": ("arwp", {"eta": (0.1, 1, 10, 100), "beta": (0.9, 0.99, 0.999)}),
    "ratio and lam": ("m-arwp", {"ratio": (0.3, 0.6, 0.9, 1.2), "lam": (0.1, 0.3, 0.5, 0.7, 0.9)}),
}
"""Figures 2 and 3 (the first two) and 4, by name: a method and a grid over its options."""


@dataclass(frozen=True)
class Setting:
    """Data, model and optimizer, and what is trained on them."""

    name: str
    title: str
    config: Config
    """The baseline from seed 0; `steps` is given, so that a doubled batch keeps them."""
    seeds: int
    seconds: float
    """What a run of the baseline takes on one core, for the estimate of the time."""
    methods: tuple[str, ...] = METHODS
    controls: tuple[Control, ...] = CONTROLS
    tune: Tune | None = field(default_factory=lambda: Tune(seeds=2, baseline=True, keep=False))
    tuned_controls: tuple[Control, ...] = ()
    """Those that also run with the tuned strength of their method."""
    lengths: tuple[str, ...] = ()
    """Methods that are also trained for ¼, ½ and 2 times the steps."""
    sweeps: Sweeps = field(default_factory=dict)
    sweep_seeds: int = 5
    large: tuple[str, ...] = LARGE
    robust: bool = True
    """Whether the final models of `methods` and `large` are measured after rounding and pruning."""
    minima: bool = False
    """Whether curvature, sharpness and weight norm of the final models are measured."""

    @property
    def baseline(self) -> str:
        """How tables call training without perturbation: SGD, AdamW."""
        return self.called(METHODS[0])

    @property
    def compressed(self) -> tuple[str, ...]:
        """The names of the rows at default strengths that are measured after compression."""
        return tuple(map(self.called, (*self.methods, *self.large))) if self.robust else ()

    def called(self, method: str) -> str:
        """How tables call a method here, its strength apart unless it is given."""
        return _label(method, self.config.optimizer)


@cache
def _label(method: str, optimizer: str) -> str:
    spec = parse(method)
    strength = f" ({spec.strength[0]} {spec.strength[1]:g})" if spec.strength else ""
    return f"{label(spec, optimizer)}{strength}"


@dataclass(frozen=True)
class Study:
    """Settings in groups: one group is finished before the next begins."""

    name: str
    title: str
    groups: tuple[tuple[Setting, ...], ...]
    cut: tuple[str, ...] = ()
    """What the design leaves out, in sentences for the page."""

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(setting for group in self.groups for setting in group)


def _recorded(name: str, steps: int, **changes: object) -> Config:
    """A recipe's baseline as studies record it: one thread, training loss, BatchNorm both ways."""
    config = recipe(name).replace(
        steps=steps, threads=1, device="cpu", track_train=True, recompute_norm=True
    )
    return config.override(changes)


def _digits() -> Study:
    mlp = _recorded("digits", 600, eval_every=2)
    resnet = _recorded("digits-resnet", 600)
    clean = {"label_noise": 0.0}

    def whole(name: str, title: str, config: Config, seeds: int, seconds: float) -> Setting:
        return Setting(
            name,
            title,
            config,
            seeds,
            seconds,
            tuned_controls=CONTROLS,
            lengths=METHODS,
            minima=True,
        )

    noisy_mlp = whole("mlp-noisy", "MLP, 20 % label noise", mlp, 20, 1.3)
    clean_mlp = whole("mlp-clean", "MLP, clean labels", mlp.override(clean), 20, 1.3)
    noisy_resnet = whole("resnet-noisy", "small ResNet, 20 % label noise", resnet, 10, 5.4)
    clean_resnet = whole(
        "resnet-clean", "small ResNet, clean labels", resnet.override(clean), 10, 5.4
    )
    return Study(
        "digits",
        "Digits",
        ((replace(noisy_mlp, sweeps=SWEEPS), clean_mlp), (noisy_resnet, clean_resnet)),
        cut=(
            "Sweeps (the paper's Figures 2 to 4) were run for the MLP with noisy labels alone, on five seeds.",
        ),
    )


def _cifar10() -> Study:
    config = _recorded("cifar10-small", 80 * 39)
    title = f"{NARROW}, 5,000 images"
    setting = Setting("resnet18", title, config, 5, 300.0, tuned_controls=CONTROLS, minima=True)
    return Study("cifar10", "CIFAR-10", ((setting,),))


def _cifar10_decay() -> Study:
    """The methods with the weight decay that SGD's trials in `cifar10` chose: an equal footing."""
    (usual,) = _cifar10().settings
    config = usual.config.override({"weight_decay": 0.002})
    setting = replace(usual, config=config, controls=(), tune=None)
    return Study(
        "cifar10-decay",
        "CIFAR-10 with weight decay 0.002",
        ((setting,),),
        cut=(
            "Planned after the first tuned runs of `cifar10`: there tuned SGD has the weight decay that "
            "its trials chose and the methods keep the recipe's. Here all have SGD's.",
            "Strengths are the defaults; nothing was tuned, and there are no controls.",
        ),
    )


def _cifar10_noisy() -> Study:
    config = _recorded("cifar10-small", 80 * 39, label_noise=0.2)
    title = f"{NARROW}, 5,000 images"
    setting = Setting("resnet18", title, config, 3, 300.0, methods=FEW, controls=())
    return Study("cifar10-noisy", "CIFAR-10 with 20 % label noise", ((setting,),))


def _cifar100() -> Study:
    config = _recorded("cifar100-small", 80 * 78)
    return Study(
        "cifar100",
        "CIFAR-100",
        ((Setting("resnet18", f"{NARROW}, 10,000 images", config, 3, 600.0),),),
        cut=("Controls were run at the default strengths alone.",),
    )


def _fashion() -> Study:
    conv = _recorded("fashion-small", 40 * 31)
    vit = _recorded("fashion-small-vit", 40 * 31)
    return Study(
        "fashion",
        "Fashion-MNIST",
        (
            (Setting("conv", "small conv net, 2,000 images", conv, 10, 40.0, tune=None),),
            (Setting("vit", "small ViT with AdamW, 2,000 images", vit, 10, 60.0, tune=None),),
        ),
        cut=(
            "Nothing was tuned: this study is there to confirm the defaults, and chooses nothing.",
        ),
    )


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        _digits(),
        _cifar10(),
        _cifar10_decay(),
        _cifar10_noisy(),
        _cifar100(),
        _fashion(),
    )
}


def study(name: str) -> Study:
    """A study by its name."""
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return STUDIES[name]
