"""Fingerprints: which code and which data a run used, where a name does not say it."""

from __future__ import annotations

import hashlib
import inspect
import uuid
from pathlib import Path
from typing import Any

import torch

from steppe.lab.data import Data


def source_fingerprint(*objects: object) -> str:
    """A digest of the source files these functions and objects were written in.

    A run that used other code is another run. Code without a source (typed at a prompt) gets a
    digest that never comes again, so that such runs are not taken for each other.
    """
    digest = hashlib.sha256()
    for item in objects:
        digest.update(_source(item).encode())
    return digest.hexdigest()[:12]


def data_fingerprint(data: Data) -> str:
    """A digest of sizes, first, middle and last samples: enough to tell data sets apart."""
    digest = hashlib.sha256(repr((data.name, data.note, len(data.train), len(data.test))).encode())
    for split in (data.train, data.test):
        few = torch.tensor([0, len(split) // 2, len(split) - 1])
        for x, y in split.batches([few], augment_seed=None):
            digest.update(x.numpy(force=True).tobytes() + y.numpy(force=True).tobytes())
    return digest.hexdigest()[:12]


def file_fingerprint(file: Path) -> str:
    """A digest of a file's content; empty where there is none (loading it will say so)."""
    if not file.is_file():
        return ""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:12]


def _source(item: object) -> str:
    named = inspect.isfunction(item) or inspect.isclass(item) or inspect.ismethod(item)
    target: Any = item if named else type(item)
    try:
        file = inspect.getsourcefile(target)
        if file and Path(file).exists():
            return Path(file).read_text(encoding="utf-8")
        return inspect.getsource(target)
    except (OSError, TypeError):
        return uuid.uuid4().hex
