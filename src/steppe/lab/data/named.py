"""What the text behind `--data` names (a data set, a folder, a file or a function), prepared for
an experiment."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from steppe.lab.data.catalog import CATALOGUE, content_digest, default_root, read
from steppe.lab.data.folder import FolderSplit, folder, opened
from steppe.lab.data.order import held_out, noisy, stratified
from steppe.lab.data.readers import BUILT_IN
from steppe.lab.data.split import Data
from steppe.lab.data.table import SUFFIXES, table
from steppe.lab.data.user import as_data
from steppe.lab.naming import check_options, did_you_mean, names_function, unknown, user_function

FOLDER = "folder:"
CIFAR_AUGMENT = ("flip", "crop", "cutout")
FOLDER_AUGMENT = ("resized-crop", "flip")
AUGMENT = {  # where nothing is said; digits and the user's own data are left as they are
    "cifar10": CIFAR_AUGMENT,
    "cifar100": CIFAR_AUGMENT,
    "fashion-mnist": ("flip", "crop"),
    "imagenet": FOLDER_AUGMENT,
}


def names() -> list[str]:
    """The data sets known by name; besides them folders, CSV files and module:function."""
    return [*BUILT_IN, *CATALOGUE, "imagenet"]


def located(name: str) -> str:
    """The same with paths made absolute: `folder:/path` for a folder, the path of a table.

    A run then means the same wherever a command is started.
    """
    if name in names():
        return name
    path = Path(name.removeprefix(FOLDER)).expanduser().resolve()
    if name.startswith(FOLDER) or (path.is_dir() and not is_table(name)):
        return FOLDER + str(path)
    return str(path) if is_table(name) else name


def is_table(name: str) -> bool:
    """Whether this is the path of a CSV file."""
    return name not in names() and name.lower().endswith(SUFFIXES) and not names_function(name)


def content_fingerprint(name: str) -> str:
    """A digest of a table's content, or of the names and sizes of a folder's files; else nothing."""
    if name.startswith(FOLDER):
        return _folder_fingerprint(name.removeprefix(FOLDER))
    if is_table(name) and Path(name).is_file():
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()[:12]
    return ""


@functools.cache  # ImageNet has 1.28 million files, and every run of a comparison asks
def _folder_fingerprint(path: str) -> str:
    digest = hashlib.sha256()
    for place, folders, files in os.walk(path):
        folders.sort()
        for file in sorted(files):
            whole = Path(place, file)
            digest.update(f"{whole.relative_to(path)} {whole.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def not_found(name: str) -> ValueError:
    """The error for a name behind which there is nothing, with what exists nearby."""
    path = Path(name.removeprefix(FOLDER)).expanduser()
    if path.is_file():
        return ValueError(
            f"{name} is neither a folder nor a table: a table's name ends in {' or '.join(SUFFIXES)}."
        )
    if name.startswith((FOLDER, ".", "~")) or os.sep in name or is_table(name):
        parent = path.parent if path.parent.is_dir() else Path.cwd()
        there = _candidates(parent)
        listed = ", ".join(there[:8]) + (", …" if len(there) > 8 else "")
        return ValueError(
            f"there is no folder or file {path}.{did_you_mean(path.name, there)} In {parent} there "
            f"are {listed or 'no folders and no tables'}."
        )
    others = ("FOLDER", "FILE.csv", "module:function")
    return unknown("data set", name, [*names(), *_candidates(Path.cwd()), *others])


def _candidates(folder: Path) -> list[str]:
    """Folders and tables in a folder."""
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if not entry.name.startswith((".", "__"))
        and (entry.is_dir() or entry.name.lower().endswith(SUFFIXES))
    )


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
    """The data set behind `name`: one of `names()`, a folder of class folders, a CSV file (with
    `target=COLUMN`), or module:function.

    `train_size` keeps a stratified subset, `label_noise` replaces that fraction of the training
    labels, `validation` splits a fraction off the training data (with its noisy labels); all
    three are fixed by `seed`, named in `note`, and leave the test split alone. `augment` names
    the augmentations of training batches (None: the usual ones of the data set, (): none).
    Other options are the data set's own.

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
    usual = FOLDER_AUGMENT if name.startswith(FOLDER) else AUGMENT.get(name, ())
    chosen = usual if augment is None else tuple(augment)
    if augment is None and not usual:
        return data  # a Data of the user's may bring its own augmentations
    return replace(data, train=data.train.augmented(chosen))


def raw(name: str, root: Path | None, seed: int, options: Mapping[str, Any]) -> Data:
    """The data set as its source has it."""
    if name == "imagenet":
        check_options(name, partial(folder, name=name, seed=seed), options)
        path = (root or default_root()) / name
        if not path.is_dir():
            raise FileNotFoundError(
                f"imagenet is not in {path.parent} (looked for imagenet/train and imagenet/val). "
                "Put it there, or name the folder it is in: --root FOLDER."
            )
        return folder(path, name=name, seed=seed, **options)
    if name.startswith(FOLDER) or is_table(name):
        path = Path(name.removeprefix(FOLDER))
        source: Callable[..., Data] = table if is_table(name) else partial(folder, name=name)
        check_options(name, partial(source, seed=seed), options)
        if not (path.is_file() if is_table(name) else path.is_dir()):
            raise not_found(name)
        return source(path, seed=seed, **options)
    if name in CATALOGUE:
        # Options are checked first: a typing error need not wait for a file.
        check_options(name, CATALOGUE[name].read, options)
        return read(name, root, **options)[0]
    if not names_function(name):
        raise not_found(name)
    made = user_function(name)(**options)
    try:
        return as_data(made, name)
    except TypeError as error:
        raise TypeError(f"{name} must return data that the lab can use: {error}") from error


def verify(name: str, root: Path | None = None) -> str:
    """One sentence on a data set that is as it should be; an error says what is not.

    Published sets: images and labels are those of the authors. Folder trees: every image opens.
    """
    name = located(name)
    if name in BUILT_IN:
        data = BUILT_IN[name]()
        return f"{name}: {len(data.train) + len(data.test):,} samples, built in."
    if name in CATALOGUE:
        data, path = read(name, root)
        content, expected = content_digest(data), CATALOGUE[name].content
        if content != expected:
            raise ValueError(
                f"{name} in {path} is not the published data set: its content's sha256 is "
                f"{content}, expected {expected}. Remove it and fetch it again."
            )
        return f"{name}: {len(data.train):,} + {len(data.test):,} images in {path}, as published."
    if name != "imagenet" and not name.startswith(FOLDER):
        raise unknown("data set to verify", name, (*names(), "folder:PATH"))
    data = raw(name, root, 0, {})
    for split in (data.train, data.test):
        assert isinstance(split, FolderSplit)
        for file in split.files:
            opened(file)
    counts = f"{len(data.train):,} + {len(data.test):,} images in {data.classes} classes"
    return f"{name}: {counts}, every one opens."


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
    """The data after what of this is asked for, in this order; the test split stays as it is."""
    if train_size is not None:
        targets = known_targets(data, "train_size")
        if not 1 <= train_size <= len(targets):
            raise ValueError(
                f"{data.name}: train_size must be 1 to {len(targets)}, got {train_size}."
            )
        subset = data.train.subset(stratified(targets, train_size, seed=seed))
        data = data.noted(f"{train_size} training samples of {len(targets)}", train=subset)
    if label_noise:
        targets = known_targets(data, "label_noise")
        if data.classes is None:
            raise ValueError(
                f"{data.name}: label_noise replaces class labels; this is a regression."
            )
        changed = noisy(targets, label_noise, classes=data.classes, seed=seed)
        note = f"{label_noise:.0%} of the training labels replaced at random"
        data = data.noted(note, train=data.train.relabelled(changed))
    if validation:
        targets = known_targets(data, "validation")
        rows = held_out(targets, validation, seed=seed, key="validation")
        train, aside = (data.train.subset(part.nonzero().flatten()) for part in (~rows, rows))
        note = f"{len(aside)} of them set aside for validation"
        data = data.noted(note, train=train, validation=aside)
    return data
