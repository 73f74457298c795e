"""Data sets by name, prepared for an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from steppe.lab.data.built_in import BUILT_IN
from steppe.lab.data.catalog import CATALOGUE, folder_data, place_of, reader
from steppe.lab.data.folder import folder
from steppe.lab.data.located import is_table, located, not_found
from steppe.lab.data.split import Data
from steppe.lab.data.subset import held_out, noisy, stratified
from steppe.lab.data.table import table
from steppe.lab.data.user import from_function
from steppe.lab.naming import check_options, names_function, user_function

CIFAR_AUGMENT = ("flip", "crop", "cutout")
FOLDER_AUGMENT = ("resized-crop", "flip")
AUGMENT = {  # where nothing is said; digits and the user's own data are left as they are
    "cifar10": CIFAR_AUGMENT,
    "cifar100": CIFAR_AUGMENT,
    "fashion-mnist": ("flip", "crop"),
    "imagenet": FOLDER_AUGMENT,
}


def load(
    name: str,
    *,
    root: Path | None = None,
    seed: int = 0,
    train_size: int | None = None,
    label_noise: float = 0.0,
    augment: tuple[str, ...] | None = None,
    validation: float = 0.0,
    **options: Any,
) -> Data:
    """The data set of this name or path, prepared for an experiment.

    `name` is one of `names()`, a folder of class folders, a CSV file (with `target=COLUMN`), or
    module:function.

    `train_size` keeps a stratified subset, `label_noise` replaces that fraction of the training
    labels, `validation` splits a fraction off the training data (with its noisy labels); all
    three are fixed by `seed`, named in `note`, and leave the test split alone. `augment` names
    the augmentations of training batches (None: the usual ones of the data set, (): none).
    Other options are the data set's own.

    Examples:
        >>> data = load("digits", label_noise=0.2)
        >>> len(data.train), len(data.test), data.note
        (400, 1397, '400 training images of 1797, the rest test; 20% of the training labels replaced at random')
    """
    name = located(name)
    if name in BUILT_IN:
        check_options(name, lambda: None, options)
        data, train_size = BUILT_IN[name](train_size=train_size, seed=seed), None
    else:
        data = raw(name, root, seed, options)
    data = prepared(data, train_size, label_noise, validation, seed=seed)
    usual = FOLDER_AUGMENT if name.startswith("folder:") else AUGMENT.get(name, ())
    chosen = usual if augment is None else tuple(augment)
    if augment is None and not usual:
        return data  # a Data of the user's may bring its own augmentations
    return replace(data, train=data.train.augmented(chosen))


def raw(name: str, root: Path | None, seed: int, options: Mapping[str, Any]) -> Data:
    """The data set as its source has it."""
    if name == "imagenet" or name.startswith("folder:"):
        check_options(name, partial(folder, name=name, seed=seed), options)
        if name != "imagenet" and not Path(name.removeprefix("folder:")).is_dir():
            raise not_found(name)
        return folder_data(name, root, seed=seed, **options)
    if is_table(name):
        check_options(name, partial(table, seed=seed), options)
        if not Path(name).is_file():
            raise not_found(name)
        return table(Path(name), seed=seed, **options)
    if name in CATALOGUE:
        # Options are checked first: a typing error need not wait for a file.
        check_options(name, reader(name), options)
        return reader(name)(place_of(name, root), **options)
    if names_function(name):
        return from_function(name, user_function(name), dict(options))
    raise not_found(name)


def known_targets(data: Data, purpose: str) -> Tensor:
    """The training targets, or an error where they cannot be known without loading everything."""
    if data.train.targets is None:
        raise ValueError(
            f"{data.name}: {purpose} needs to know all targets. Give the training dataset an "
            "attribute `targets`."
        )
    return data.train.targets


def prepared(
    data: Data, train_size: int | None, label_noise: float, validation: float, *, seed: int
) -> Data:
    """The data after what of this is asked for, in this order."""
    if train_size is not None:
        data = with_train_size(data, train_size, seed=seed)
    if label_noise:
        data = with_label_noise(data, label_noise, seed=seed)
    return with_validation(data, validation, seed=seed) if validation else data


def with_train_size(data: Data, size: int, *, seed: int) -> Data:
    """The data with a stratified subset of its training split."""
    targets = known_targets(data, "train_size")
    if not 1 <= size <= len(targets):
        raise ValueError(f"{data.name}: train_size must be 1 to {len(targets)}, got {size}.")
    chosen = stratified(targets, size, seed=seed)
    note = f"{size} training samples of {len(targets)}"
    return data.noted(note, train=data.train.subset(chosen))


def with_label_noise(data: Data, fraction: float, *, seed: int) -> Data:
    """The data with a fraction of its training labels replaced; the test labels stay true."""
    targets = known_targets(data, "label_noise")
    if data.classes is None:
        raise ValueError(f"{data.name}: label_noise replaces class labels; this is a regression.")
    changed = noisy(targets, fraction, classes=data.classes, seed=seed)
    note = f"{fraction:.0%} of the training labels replaced at random"
    return data.noted(note, train=data.train.relabelled(changed))


def with_validation(data: Data, fraction: float, *, seed: int) -> Data:
    """The data with a part of the training split set aside as `validation`."""
    rows = held_out(known_targets(data, "validation"), fraction, seed=seed, key="validation")
    rest, chosen = (data.train.subset(part.nonzero().flatten()) for part in (~rows, rows))
    note = f"{len(chosen)} of them set aside for validation"
    return data.noted(note, train=rest, validation=chosen)
