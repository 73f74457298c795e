"""Downloads: a file over HTTP, checked, and an archive unpacked so that no path leaves its folder."""

from __future__ import annotations

import hashlib
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path, PurePosixPath

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known
CHUNK = 1 << 18
TIMEOUT = 30.0


def download(url: str, file: Path, *, md5: str, progress: Progress | None = None) -> None:
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


def move_in(folder: Path, target: Path) -> None:
    """Rename a finished folder to its place; one that another process put there first stays."""
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
