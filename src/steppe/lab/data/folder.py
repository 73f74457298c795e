"""Folder trees: one folder per class with image files in it, ImageNet or anybody's own."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from steppe.lab.data.augment import Pipeline, parse
from steppe.lab.data.order import generator, held_out
from steppe.lab.data.split import Data, Split

NORMALISATION = Pipeline(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
TEST_FOLDERS = ("val", "test", "validation")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
TRIES = 10
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Decoder:
    """Reads files as colour images (3, size, size): grey, palette and CMYK ones are converted.

    For training (`random_crop`, with a seed): a part of 8 to 100 % of the area with an aspect
    ratio of 3/4 to 4/3. Otherwise: the shorter side to `resize`, then the middle.
    """

    size: int = 224
    resize: int = 256
    random_crop: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ValueError(
                f"size must be at least 1 and at most resize, got size={self.size}, resize={self.resize}."
            )

    def batch(self, files: Sequence[str | Path], seed: int | None) -> Tensor:
        """The images of these files, (N, 3, size, size)."""
        if seed is None or not self.random_crop:
            return torch.stack([self.middle(opened(file)) for file in files])
        draws = torch.rand(len(files), TRIES, 4, generator=generator("crop", seed)).tolist()
        images = []
        for file, numbers in zip(files, draws, strict=True):
            image = opened(file)
            box = crop_box(image.width, image.height, numbers)
            images.append(pixels(image.resize((self.size, self.size), resample=2, box=box)))
        return torch.stack(images)

    def middle(self, image: Image.Image) -> Tensor:
        scale = self.resize / min(image.size)
        width, height = (max(self.resize, int(side * scale)) for side in image.size)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        resized = image.resize((width, height), resample=2)  # 2: bilinear
        return pixels(resized.crop((left, top, left + self.size, top + self.size)))


def crop_box(width: int, height: int, draws: list[list[float]]) -> Box:
    """The part of an image to train on; `draws` has four uniform numbers for each try.

    Area and (log) aspect ratio are uniform; a part that does not fit is drawn again, and after
    the last try the largest middle part with an allowed ratio is taken.
    """
    for area, ratio, across, down in draws:
        target = width * height * (0.08 + 0.92 * area)
        aspect = math.exp(math.log(3 / 4) + ratio * math.log(16 / 9))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def opened(file: str | Path) -> Image.Image:
    """The file's image in colour, decoded."""
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read as an image ({error}). Remove or replace it."
        ) from error


def pixels(image: Image.Image) -> Tensor:
    """(3, height, width) as bytes."""
    content = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return content.view(image.height, image.width, 3).permute(2, 0, 1)


@dataclass(frozen=True, eq=False)
class FolderSplit(Split):
    """Image files, decoded when they are asked for; `workers` processes decode ahead."""

    files: tuple[str, ...]  # not Path: ImageNet has 1.28 million, and workers copy them
    targets: Tensor
    decoder: Decoder = field(default_factory=Decoder)
    pipeline: Pipeline = NORMALISATION

    def __len__(self) -> int:
        return len(self.files)

    def subset(self, indices: Tensor) -> FolderSplit:
        files = tuple(self.files[k] for k in indices.tolist())
        return replace(self, files=files, targets=self.targets[indices])

    def augmented(self, names: tuple[str, ...]) -> FolderSplit:
        """`resized-crop` belongs to the decoding, all others work on whole batches."""
        decoder = replace(self.decoder, random_crop="resized-crop" in names)
        others = tuple(parse(name) for name in names if name != "resized-crop")
        return replace(self, decoder=decoder, pipeline=replace(self.pipeline, augmentations=others))

    def load(self, indices: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
        images = self.decoder.batch([self.files[k] for k in indices.tolist()], seed)
        return self.pipeline(images, seed), self.targets[indices]


def folder(
    path: Path,
    *,
    size: int = 224,
    resize: int | None = None,
    test: float = 0.2,
    seed: int = 0,
    name: str = "",
) -> Data:
    """The data set of a folder with one folder of images per class.

    With folders `train` and `val` (or `test`) in it, each has the class folders. Without them, the
    fraction `test` of each class is the test split, drawn by `seed`. Images become `size` x `size`;
    for test the shorter side is first brought to `resize` (default: 8/7 of `size`, 256 for 224).
    """
    decoder = Decoder(size, max(size, round(size * 8 / 7)) if resize is None else resize)
    name = name or f"folder:{path}"
    if not path.is_dir():
        raise FileNotFoundError(f"the folder {path} does not exist.")
    separate = next((path / n for n in TEST_FOLDERS if (path / n).is_dir()), None)
    if (path / "train").is_dir() != (separate is not None):
        raise FileNotFoundError(
            f"{path} must have both a folder 'train' and a folder 'val' (or 'test'), or neither "
            f"and the class folders themselves; it has {listing(path)}."
        )
    if separate is None:
        classes = class_folders(path)
        whole = FolderSplit(*labelled_files(path, classes), decoder)
        rows = held_out(whole.targets, test, seed=seed, key="test")
        train, rest = (whole.subset(part.nonzero().flatten()) for part in (~rows, rows))
        note = f"{len(rest)} of {len(whole)} images are the test split"
    else:
        classes = class_folders(path / "train")
        extra = sorted(set(class_folders(separate)) - set(classes))
        if extra:
            raise ValueError(
                f"{separate} has classes that {path / 'train'} has not: {', '.join(extra[:5])}."
            )
        parts = (path / "train", separate)
        train, rest = (FolderSplit(*labelled_files(part, classes), decoder) for part in parts)
        note = ""
    return Data(name, train, rest, classes=len(classes), shape=(3, size, size), note=note)


def class_folders(path: Path) -> list[str]:
    """The class names of a tree, sorted: a class's index is its place in this list."""
    found = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    if not found:
        raise ValueError(
            f"{path} must have one folder of images per class; it has {listing(path)}."
        )
    return found


def labelled_files(path: Path, classes: list[str]) -> tuple[tuple[str, ...], Tensor]:
    """Every image file under the class folders, sorted, with its class index."""
    files: list[str] = []
    labels: list[int] = []
    for index, name in enumerate(classes):
        below = [f"{place}{os.sep}{f}" for place, _, names in os.walk(path / name) for f in names]
        images = sorted(file for file in below if file.lower().endswith(SUFFIXES))
        files += images
        labels += [index] * len(images)
    if not files:
        raise ValueError(f"No image file under {path}; looked for {', '.join(SUFFIXES)}.")
    return tuple(files), torch.tensor(labels)


def listing(path: Path) -> str:
    """A few names in a folder, for an error."""
    names = sorted(entry.name for entry in os.scandir(path))
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "nothing in it"
