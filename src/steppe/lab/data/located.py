"""What the text behind `--data` names: a data set, a folder, a file or a function."""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
from pathlib import Path

from steppe.lab.data.built_in import BUILT_IN
from steppe.lab.data.catalog import CATALOGUE
from steppe.lab.data.table import SUFFIXES
from steppe.lab.naming import names_function, unknown

FOLDER = "folder:"


def names() -> list[str]:
    """The data sets known by name; besides them folders, CSV files and module:function."""
    return [*BUILT_IN, *CATALOGUE, "imagenet"]


def located(name: str) -> str:
    """The same with paths made absolute: `folder:/path` for a folder, the path of a table.

    A run then means the same wherever a command is started.
    """
    if name in names():
        return name
    if name.startswith(FOLDER):
        return FOLDER + str(_absolute(name.removeprefix(FOLDER)))
    if is_table(name):
        return str(_absolute(name))
    return FOLDER + str(_absolute(name)) if _absolute(name).is_dir() else name


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
    looks_like_path = name.startswith((FOLDER, ".", "~")) or os.sep in name or is_table(name)
    if looks_like_path:
        parent = path.parent if path.parent.is_dir() else Path.cwd()
        there = _candidates(parent)
        near = difflib.get_close_matches(path.name, there, n=2, cutoff=0.5)
        guess = f" Did you mean {' or '.join(str(parent / n) for n in near)}?" if near else ""
        listed = ", ".join(there[:8]) + (", …" if len(there) > 8 else "")
        return ValueError(
            f"there is no folder or file {path}.{guess} In {parent} there are "
            f"{listed or 'no folders and no tables'}."
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


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()
