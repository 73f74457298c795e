"""Evidence: one JSON line per finished run, appended to a file that is committed.

A line has all that tables and figures need, and no weights: the config, where it ran, the final
metrics and what was measured at the minimum. Older lines also have curves, which nothing reads.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from steppe.lab.errors import LabError
from steppe.lab.results import Result, from_record
from steppe.lab.runs import Record, lock

logger = logging.getLogger("steppe")

DEFAULT_EVIDENCE = Path("evidence")
ARCHIVE = "archive"


@dataclass(frozen=True)
class Line:
    """A finished or diverged run."""

    label: str
    result: Result
    minima: Record = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether a finished run's model was measured after compression, and in all ways if at all."""
        measured = "largest_eigenvalue" not in self.minima or "plain_average" in self.minima
        return self.result.status != "finished" or ("robustness" in self.minima and measured)

    @cached_property
    def run(self) -> str:
        """The identity of its config, in today's terms: a setting that came later has its default."""
        return self.result.config.identity

    def text(self) -> str:
        """As it stands in the file."""
        content = {
            "run": self.run,
            "label": self.label,
            "result": self.result.to_dict(),
            "minima": self.minima,
        }
        return json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n"


def from_text(text: str) -> Line:
    """A line from the file; ValueError where it is none."""
    try:
        content = json.loads(text)
        return Line(content["label"], from_record(content["result"]), content["minima"])
    except (KeyError, TypeError, LabError) as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Evidence:
    """The lines of one study."""

    folder: Path
    study: str

    @property
    def file(self) -> Path:
        return self.folder / f"{self.study}.jsonl"

    @cached_property
    def lines(self) -> dict[str, Line]:
        """All lines by the identity of their run; of two lines of one run the first complete one counts."""
        found: dict[str, Line] = {}
        whole, cut = self._read()
        if cut:
            logger.warning(
                "%s: the last line was cut off by a kill and does not count; its run is done again",
                self.file,
            )
        for number, text in enumerate(whole, 1):
            try:
                line = from_text(text)
            except ValueError as error:
                raise LabError(
                    f"{self.file}, line {number} is damaged ({error}). Restore the file from git, or "
                    "delete the line: its run is then done again."
                ) from None
            if line.run not in found or (line.complete and not found[line.run].complete):
                found[line.run] = line
        return found

    def _read(self) -> tuple[list[str], bytes]:
        """The complete lines, and what a kill left of a last one."""
        content = self.file.read_bytes() if self.file.exists() else b""
        whole, newline, cut = content.rpartition(b"\n")
        return (whole + newline).decode("utf-8").splitlines(), cut

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file for this process alone, a cut-off last line removed; leave no empty one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab") as stream:
            lock(stream, f"{self.file}")
            _, cut = self._read()
            if cut:
                _ = self.lines  # says so
                stream.truncate(self.file.stat().st_size - len(cut))
            try:
                yield
            finally:
                if not self.file.stat().st_size:
                    self.file.unlink()

    def append(self, line: Line) -> None:
        """Write a line, in one piece, to the disk."""
        self._add(line.text())
        self.lines[line.run] = line

    def _add(self, text: str) -> None:
        number = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(number, text.encode("utf-8"))
            os.fsync(number)
        finally:
            os.close(number)

    def archive(self, name: str, keep: Container[str]) -> int:
        """Move into archive/NAME the lines of all runs but those to keep, and of these the lines that do
        not count beside a complete one; give their number."""
        if Path(name).name != name:
            raise LabError(f"an archive is called by one word, got {name!r}.")
        old = Evidence(self.folder / ARCHIVE / name, self.study)
        with self.writing():
            counting = {line.text() for run, line in self.lines.items() if run in keep}
            texts = self._read()[0]
            stay = {text for text in texts if from_text(text).text() in counting}
            if aside := [text for text in texts if text not in stay]:
                # First added there, then gone from here: a kill in between loses nothing.
                with old.writing():
                    there = set(old._read()[0])
                    old._add("".join(f"{text}\n" for text in aside if text not in there))
                new = self.file.with_suffix(".new")
                left = "".join(f"{text}\n" for text in texts if text in stay)
                new.write_text(left, encoding="utf-8")
                new.replace(self.file)
        for run in [run for run in self.lines if run not in keep]:
            del self.lines[run]
        return len(aside)


def archives(folder: Path) -> dict[str, list[Evidence]]:
    """By name the lines that were set aside when defaults changed, a file for each study."""
    found: dict[str, list[Evidence]] = {}
    for file in sorted((folder / ARCHIVE).glob("*/*.jsonl")):
        found.setdefault(file.parent.name, []).append(Evidence(file.parent, file.stem))
    return found
