"""Checkpoints that survive a kill at any moment: written whole or not at all, checked, rotated."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from pathlib import Path
from typing import Any

from steppe.lab.errors import LabError

logger = logging.getLogger("steppe")

State = dict[str, Any]
DIGEST = 32
"""Bytes of a sha256."""


def write_atomic(file: Path, content: bytes) -> None:
    """The file with this content, or, whatever happens on the way, the file as it was before."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise LabError(
            f"cannot write {file}: {error.strerror or error}. "
            "Make room or choose another folder with --store; what was saved before is unharmed."
        ) from error


def packed(state: State) -> bytes:
    """A state as the bytes of a file that `torch.load(weights_only=True)` reads."""
    import torch

    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def save(folder: Path, step: int, state: State, *, keep: int) -> Path:
    """Add the checkpoint of this step, its digest behind it, and drop all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = packed(state)
    file = folder / f"step-{step:09d}.pt"
    write_atomic(file, content + hashlib.sha256(content).digest())
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return file


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def load_newest(folder: Path) -> State | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over."""
    for file in reversed(checkpoints(folder)):
        try:
            return load(file)
        except LabError as error:
            logger.warning("%s The one before it is used.", error)
    return None


def load(file: Path) -> State:
    """A checkpoint's state, if the file is what was written."""
    import torch  # here, so that run folders can be listed without it

    written = file.read_bytes()
    content, digest = written[:-DIGEST], written[-DIGEST:]
    if hashlib.sha256(content).digest() != digest:
        raise LabError(f"the checkpoint {file} is damaged (its content does not match its digest).")
    state: State = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    return state
