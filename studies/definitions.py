"""The studies: what is trained, by which methods and controls, on how many seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from steppe.lab import specs
from steppe.lab.config import Config
from steppe.lab.errors import looked_up
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


@dataclass(frozen=True)
class Control:
    """A method with one thing changed, and what that is called."""

    name: str
    method: str
    batch: int = 1
    """Times the usual batch, in as many steps."""
    steps: int = 1
    """Times the usual steps."""
    options: Mapping[str, bool | float] = field(default_factory=dict)


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

TWO_BATCHES = {
    optimizer: Control(f"{name}, two batches", "m-rwp", options={"ratio": 0.0})
    for optimizer, name in (("sgd", "SGD"), ("adamw", "AdamW"))
}
"""By optimizer the baseline on the two batches a step of a mixed method, which is one without noise:
the same batches in the same order, averaged in the same way."""


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
    large: tuple[str, ...] = LARGE
    robust: bool = True
    """Whether the final models of `methods` and `large` are measured after rounding and pruning."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Further methods that are compared with each other."""
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

    def reference(self, name: str) -> str:
        """The row a method is compared with: for a mixed one the baseline on two batches, if it is run."""
        twice = TWO_BATCHES.get(self.config.optimizer)
        mixed = name.startswith("m-") and twice in self.controls
        return twice.name if twice and mixed else self.baseline

    def called(self, method: str) -> str:
        """How tables call a method or control here, its strength apart unless it is given."""
        return method if ", " in method else _label(method, self.config.optimizer)


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
    margin: float | None = None
    """Points within which a default must lie of its reference, in a study that confirms defaults."""

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(setting for group in self.groups for setting in group)


def _recorded(config: Config, steps: int, **changes: object) -> Config:
    """A baseline as studies record it: one thread, training loss, BatchNorm both ways."""
    recorded = config.replace(
        steps=steps, threads=1, device="cpu", track_train=True, recompute_norm=True
    )
    return recorded.override(changes)


def _digits() -> Study:
    groups = []
    for net, title, config, seeds, seconds in (
        ("mlp", "MLP", _recorded(recipe("digits"), 600, eval_every=2), 20, 1.3),
        ("resnet", "small ResNet", _recorded(recipe("digits-resnet"), 600), 10, 5.4),
    ):
        noisy = Setting(
            f"{net}-noisy",
            f"{title}, 20 % label noise",
            config,
            seeds,
            seconds,
            tuned_controls=CONTROLS,
            minima=True,
        )
        clean = replace(
            noisy,
            name=f"{net}-clean",
            title=f"{title}, clean labels",
            config=config.replace(label_noise=0.0),
        )
        groups.append((noisy, clean))
    return Study("digits", "Digits", tuple(groups))


def _cifar10() -> Study:
    config = _recorded(recipe("cifar10-small"), 80 * 39)
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
    (usual,) = _cifar10().settings
    config = usual.config.override({"label_noise": 0.2})
    setting = Setting("resnet18", usual.title, config, 5, 300.0, FEW, controls=(), tune=None)
    return Study(
        "cifar10-noisy",
        "CIFAR-10 with 20 % label noise",
        ((setting,),),
        cut=("Nothing was tuned, and there are no controls.",),
    )


def _confirmation() -> Study:
    """Data and models on which no default was chosen, the cheap ones first."""

    rows = Config(model="mlp", batch=32, lr=0.05)
    wine = _recorded(rows.replace(data="wine"), 600, eval_every=50)
    cancer = _recorded(rows.replace(data="breast-cancer"), 600, eval_every=20)
    mnist = _recorded(
        rows.replace(data="mnist"), 20 * 78, batch=64, drop_last=True, train_size=5000, eval_every=5
    )
    vit = _recorded(recipe("fashion-small-vit"), 40 * 31)
    epochs = 30
    cifar = _recorded(recipe("cifar100-small"), epochs * 78)
    settings = [
        Setting("wine", "wine, 89 rows, MLP", wine, 20, 2.0),
        Setting("breast-cancer", "breast cancer, 284 rows, MLP", cancer, 20, 2.0),
        Setting("mnist", "MNIST, 5,000 images, MLP", mnist, 10, 6.0),
        Setting("fashion-vit", "Fashion-MNIST, 2,000 images, small ViT", vit, 10, 60.0),
        Setting(
            "cifar100", f"CIFAR-100, 10,000 images, {NARROW}", cifar, 5, 240.0, ("sgd", *RANDOM)
        ),
    ]
    groups = [
        replace(
            setting,
            controls=(TWO_BATCHES[setting.config.optimizer],),
            tune=None,
            large=LARGE[:1] if setting.methods == METHODS else (),
        )
        for setting in settings
    ]
    return Study(
        "confirmation",
        "Confirmation of the defaults",
        tuple((setting,) for setting in groups),
        cut=(
            "It runs once, when the defaults are chosen: no default was chosen on these "
            "data sets with these models, and nothing is tuned. Training and test data are the same for all seeds.",
            f"CIFAR-100 is trained for {epochs} epochs at 16x16, without SAM and MSAM: a run takes minutes.",
        ),
        margin=1.0,
    )


def _paper() -> Study:
    """The paper's CIFAR-10 recipe, in a net and a length that a processor trains."""
    epochs = 30
    config = _recorded(recipe("cifar10-resnet18"), epochs * 196, width=0.25, eval_every=5)
    arwp, m_arwp, sam = "arwp:sigma=0.02", "m-arwp:sigma=0.03", "sam:rho=0.1"
    setting = Setting(
        "resnet18",
        f"{NARROW}, all 50,000 images, {epochs} epochs",
        config,
        3,
        3600.0,
        methods=("sgd", sam, arwp, m_arwp, "arwp", "m-arwp"),
        controls=(),
        tune=None,
        large=(),
        pairs=((m_arwp, sam), ("arwp", arwp), ("m-arwp", m_arwp), ("m-arwp", sam)),
    )
    return Study(
        "paper",
        "CIFAR-10 as in the paper",
        ((setting,),),
        cut=(
            "The paper's data, augmentation, batch, learning rate and weight decay, in a net of a quarter of the "
            f"width and for {epochs} of its 200 epochs. Its sigma is doubled (0.02, rising, for ARWP and 0.03 for "
            "m-ARWP): a filter has a quarter of the entries, so that is its relative displacement.",
            "Three seeds: nothing is tested.",
        ),
    )


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        _digits(),
        _cifar10(),
        _cifar10_decay(),
        _cifar10_noisy(),
        _confirmation(),
        _paper(),
    )
}


def study(name: str) -> Study:
    """A study by its name."""
    return looked_up("study", name, STUDIES)
