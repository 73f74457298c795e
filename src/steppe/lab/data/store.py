"""The store: the folder where data sets lie, and how their files are found and read there."""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path


def default_root() -> Path:
    """`$STEPPE_DATA`, or ~/.cache/steppe."""
    return Path(os.environ.get("STEPPE_DATA") or Path.home() / ".cache" / "steppe").expanduser()


@dataclass(frozen=True)
class Place:
    """Where a data set's files are: in a folder, or still in their archive."""

    path: Path
    folder: str = ""

    @property
    def is_archive(self) -> bool:
        return self.path.is_file()

    def read(self, *names: str) -> list[bytes]:
        """The contents of some of its files, unpacked if they are gzipped."""
        return self._from_archive(names) if self.is_archive else [self._file(n) for n in names]

    def _file(self, name: str) -> bytes:
        file = self.path / name
        if file.is_file():
            return file.read_bytes()
        zipped = self.path / f"{name}.gz"
        if not zipped.is_file():
            raise FileNotFoundError(f"{self.path} has no file {name}. Is the data set complete?")
        try:
            return gzip.decompress(zipped.read_bytes())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
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
        except (EOFError, zlib.error, tarfile.TarError, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.path} is damaged ({error}). Fetch it again.") from error
        for name in names:
            if name not in found:
                raise FileNotFoundError(f"{self.path} has no file {self.folder}/{name}.")
        return [found[name] for name in names]
