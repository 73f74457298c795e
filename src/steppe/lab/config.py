"""One training run, completely described by one frozen dataclass.

The same class is the configuration file of a run, the help text of the commands and what a
recipe returns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from tyro.conf import Suppress

from steppe.lab.coercion import coerce, field_types
from steppe.lab.errors import LabError, unknown
from steppe.lab.options import Maybe

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Config:
    """One run: what is trained on what, by which method, for how long, from which seed."""

    data: str = "digits"
    """A data set of `steppe data`, a folder of class folders, FILE.csv, or module:function."""
    model: str = "mlp"
    """A built-in model, torchvision:NAME, timm:NAME, or module:function."""
    method: str = "sgd"
    """The method and its options: sgd, sam:rho=.1, arwp:ratio=.6,eta=1, m-arwp:sigma=.015 …"""
    seed: int = 0
    """Fixes initial weights, data order, augmentation and noise."""

    epochs: float = 30.0
    """Passes of SGD over the data; every method takes that many optimizer steps."""
    steps: Maybe[int] = None
    """Optimizer steps, in place of epochs."""
    batch: int = 128
    """Samples per pass; a two-batch method sees twice as many per step."""
    drop_last: bool = False
    """Leave out the last batch of an epoch where it is smaller than the others."""

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """The optimizer that is given the gradients."""
    lr: float = 0.1
    """The highest learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rate over the steps: cosine to 0, or constant."""
    warmup: int = 0
    """Optimizer steps of linear warm-up before that."""
    momentum: float = 0.9
    """Momentum of SGD (no Nesterov)."""
    weight_decay: float = 5e-4
    """Weight decay, as the optimizer understands it."""
    clip: Maybe[float] = None
    """Clip the gradient to this norm."""

    train_size: Maybe[int] = None
    """Use only this many training samples (stratified)."""
    label_noise: float = 0.0
    """Replace this fraction of the training labels by random other classes."""
    augment: Annotated[Maybe[tuple[str, ...]], tyro.conf.arg(metavar="[NAME ...]")] = None
    """Augmentations of the training data. Not given: the usual ones of the data set."""
    validation: float = 0.0
    """Hold out this fraction of the training data, to choose settings by."""
    data_seed: Maybe[int] = 0
    """Fixes subset, label noise and validation split. none: they follow the seed."""
    root: Maybe[str] = None
    """The folder of data sets. Not given: $STEPPE_DATA, or ~/.cache/steppe."""
    data_options: Annotated[Mapping[str, Value], Suppress] = field(default_factory=dict)
    """Further options of the data set (--set data_options.NAME=VALUE)."""

    width: float = 1.0
    """Multiplies the width of a built-in model."""
    model_options: Annotated[Mapping[str, Value], Suppress] = field(default_factory=dict)
    """Further options of the model (--set model_options.NAME=VALUE)."""
    init: Maybe[str] = None
    """Start from the weights in this file (a plain state dict): fine-tuning."""
    task: Maybe[str] = None
    """classification, regression or module:function. Not given: as the targets are."""

    eval_every: int = 1
    """Evaluate on the test data every N epochs; 0: only at the end."""
    eval_train: int = 10_000
    """Training samples for the training metrics at the end, un-augmented."""
    track_train: bool = False
    """Record the training metrics, at the true weights, at every evaluation."""
    recompute_norm: bool = False
    """Also evaluate with BatchNorm statistics recomputed at the final weights."""
    checkpoint_minutes: float = 5.0
    """Save a checkpoint at least this often; 0: after every step."""
    keep: int = 2
    """Checkpoints kept."""

    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto: a GPU if there is one."""
    threads: Maybe[int] = None
    """CPU threads; results depend on them to the last bit. Not given: torch's choice."""
    channels_last: bool = False
    """Memory layout of images; faster for convolution nets."""
    workers: int = 0
    """Processes that load data."""

    recipe: Annotated[str, Suppress] = ""
    """The recipe this came from."""
    code: Annotated[str, Suppress] = ""
    """Fingerprint of the user's own code, data and initial weights, where the run uses any."""

    def __post_init__(self) -> None:
        for name in FLOATS:  # 30 and 30.0 are one config
            object.__setattr__(self, name, float(getattr(self, name)))
        check(self)

    def replace(self, **changes: Any) -> Config:
        """The same run with some fields changed."""
        return dataclasses.replace(self, **changes)

    def override(self, settings: Mapping[str, object]) -> Config:
        """The same run with fields changed by name, from text or from values.

        >>> Config().override({"epochs": "3", "model_options.depth": "2"}).model_options
        {'depth': 2}
        """
        types = field_types(Config)
        changes: dict[str, Any] = {}
        for name, value in settings.items():
            key, _, option = name.replace("-", "_").partition(".")
            if key not in types:
                raise unknown("setting", name, set(types) - {"recipe", "code"})
            if option:
                options = changes.get(key, getattr(self, key))
                if not isinstance(options, Mapping):
                    raise LabError(f"{key} takes one value, not options: write {key}=…")
                changes[key] = {**options, option: coerce(name, value, Value)}
            else:
                changes[key] = coerce(name, value, types[key])
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @property
    def identity(self) -> str:
        """Runs with the same identity end with the same weights, bit for bit."""
        from steppe.noise import VERSION  # here: `--help` must not wait for torch

        return _digest(self, without=OUTSIDE, noise=VERSION)

    @property
    def experiment(self) -> str:
        """Runs of one experiment differ in seed and machine alone."""
        return _digest(self, without=OUTSIDE | MACHINE | {"seed"})


OUTSIDE = {"root", "keep", "checkpoint_minutes", "workers", "recipe"}
"""Fields that leave the trained weights and their metrics unchanged."""

RECORDED = {"eval_every", "eval_train", "track_train", "recompute_norm"}
MACHINE = {"device", "threads", "channels_last"} | RECORDED
"""Fields that leave the experiment the same, but not its last bits or what is recorded."""

FLOATS = [name for name, kind in field_types(Config).items() if kind is float]
POSITIVE = ("epochs", "batch", "lr", "width", "keep", "eval_train")
OPTIONAL = ("steps", "train_size", "clip", "threads")
NOT_NEGATIVE = ("warmup", "weight_decay", "eval_every", "checkpoint_minutes", "workers", "momentum")
BOUNDS: tuple[tuple[Sequence[str], str, Callable[[float], bool]], ...] = (
    (POSITIVE + OPTIONAL, "above 0", lambda value: value > 0),
    (NOT_NEGATIVE, "at least 0", lambda value: value >= 0),
    (("label_noise", "validation"), "in [0, 1)", lambda value: 0 <= value < 1),
    (FLOATS, "finite", math.isfinite),
)


def check(config: Config) -> None:
    """Raise for values that no run can have."""
    for names, bound, holds in BOUNDS:
        for name in names:
            value = getattr(config, name)
            if value is not None and not holds(value):
                raise LabError(f"{name} must be {bound}, got {value}.")
    for name in ("optimizer", "schedule"):
        valid = get_args(field_types(Config)[name])
        if getattr(config, name) not in valid:
            raise unknown(name, str(getattr(config, name)), valid)


def as_config(given: Config | Mapping[str, object] | None) -> Config:
    """A config from a `Config`, a mapping of its fields, or nothing.

    >>> as_config({"epochs": 3, "data_options.target": "price"}).data_options
    {'target': 'price'}
    """
    if given is None or isinstance(given, Config):
        return given or Config()
    if not isinstance(given, Mapping):
        raise LabError(f"config must be a Config or a mapping, got {type(given).__name__}.")
    return Config().override(given)


def read_config(file: Path) -> Config:
    """A config from a TOML or JSON file; a run's own config.json repeats it."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise LabError(f"cannot read the config file {file}: {error.strerror}.") from None
    try:
        values = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise LabError(f"{file} is not valid {file.suffix.lstrip('.').upper()}: {error}.") from None
    if not isinstance(values, dict):
        raise LabError(f"{file} must hold a table of settings, got a {type(values).__name__}.")
    return as_config(values)


def settings(pairs: tuple[str, ...]) -> dict[str, str]:
    """`("epochs=30", "lr=.1")` as a mapping."""
    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not (sign and name):
            raise LabError(f"write a setting as NAME=VALUE, for example epochs=30; got {pair!r}.")
        found[name] = value
    return found


def _digest(config: Config, *, without: set[str], **more: int) -> str:
    kept = {name: value for name, value in config.to_dict().items() if name not in without} | more
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
