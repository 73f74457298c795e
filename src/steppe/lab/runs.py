"""The run store: one folder per run, with all that is known about it.

config.json        the full config; `steppe train --config` repeats the run
environment.json   versions, commit, processor
metrics.jsonl      one line per epoch
checkpoints/       the newest few, until the run is finished
model.pt           the final weights, a plain state dict
result.json        written last: a run without it is not finished
compressed.json    metrics after rounding and pruning, once they were asked for
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from steppe.lab.checkpoints import checkpoints, write_atomic
from steppe.lab.config import Config, as_config
from steppe.lab.errors import LabError
from steppe.lab.naming import did_you_mean, shown_name

Record = dict[str, Any]
Status = Literal["finished", "diverged", "unfinished"]
DEFAULT_STORE = Path("runs")
COMPRESSED = "compressed.json"


class BusyError(LabError):
    """Another process has the run."""


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model_file(self) -> Path:
        return self.folder / "model.pt"

    @property
    def config(self) -> Config:
        return as_config(_read_json(self.folder / "config.json"))

    @property
    def environment(self) -> Record:
        return _read_json(self.folder / "environment.json")

    @property
    def result(self) -> Record | None:
        """What the run ended with; None while it has not."""
        file = self.folder / "result.json"
        return _read_json(file) if file.exists() else None

    @property
    def compressed(self) -> Record:
        """Metrics after compression; empty if nobody asked for them yet."""
        file = self.folder / COMPRESSED
        return _read_json(file) if file.exists() else {}

    @property
    def status(self) -> Status:
        result = self.result
        return "unfinished" if result is None else result["status"]

    @property
    def metrics(self) -> list[Record]:
        """One record per evaluated epoch; a line cut off by a kill is left out."""
        file, records = self.folder / "metrics.jsonl", []
        with suppress(FileNotFoundError, ValueError):
            for line in file.read_text(encoding="utf-8").splitlines():
                records.append(json.loads(line))
        return records

    def write_json(self, name: str, content: Record) -> None:
        write_atomic(self.folder / name, (json.dumps(content, indent=2) + "\n").encode())

    def append_metrics(self, record: Record) -> None:
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def rewind_metrics(self, step: int) -> None:
        """Forget the records from this step on: they will be made again."""
        kept = [record for record in self.metrics if record["step"] < step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomic(self.folder / "metrics.jsonl", text.encode())

    def progress(self) -> int:
        """The step a resumed run would begin with."""
        saved = checkpoints(self.checkpoints)
        return int(saved[-1].stem.partition("-")[2]) if saved else 0


@dataclass(frozen=True)
class Store:
    """A folder of runs."""

    folder: Path = DEFAULT_STORE

    def place(self, config: Config) -> Run:
        """Where a run with this config lives."""
        about = config.recipe or f"{shown_name(config.data)}-{shown_name(config.model)}"
        method = config.method.partition(":")[0]
        about = about[:60]  # file systems take names of 255 bytes
        readable = "".join(c if c.isalnum() else "-" for c in f"{about}-{method}").strip("-")
        return Run(self.folder / f"{readable}-seed{config.seed}-{config.identity}")

    def find(self, config: Config) -> Run | None:
        """The run with this config's identity, whatever recipe it was started from."""
        found = self.folder.glob(f"*-{config.identity}/config.json")
        return next((Run(file.parent) for file in found), None)

    def runs(self) -> list[Run]:
        """All runs, by name."""
        return [Run(file.parent) for file in sorted(self.folder.glob("*/config.json"))]

    def get(self, name: str) -> Run:
        """A run by its folder, its name, or a part of its name that no other has."""
        if (Path(name) / "config.json").exists():
            return Run(Path(name))
        runs = self.runs()
        matches = [run for run in runs if name in run.name]
        matches = [run for run in matches if run.name == name] or matches
        if len(matches) == 1:
            return matches[0]
        if not matches:
            guess = did_you_mean(name, [run.name for run in runs], most=2)
            raise LabError(
                f"there is no run {name!r} in {self.folder}.{guess} `steppe runs` lists them."
            )
        names = ", ".join(run.name for run in matches[:4])
        raise LabError(f"{name!r} fits {len(matches)} runs ({names} …): give more of the name.")

    def remove(self, run: Run) -> None:
        """Delete a run's folder."""
        with locked(run):
            shutil.rmtree(run.folder)


@contextmanager
def locked(run: Run) -> Iterator[None]:
    """Hold a run, so that no second process writes into it; a killed process lets go.

    A folder in which nothing came to be is removed again.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    file = run.folder / ".lock"
    try:
        with file.open("w") as stream:
            lock(stream, f"the run {run.folder}")
            yield
    finally:
        if run.folder.exists() and set(run.folder.iterdir()) <= {file}:
            shutil.rmtree(run.folder)


def lock(stream: IO[Any], what: str) -> None:
    """Hold an open file for this process alone, until it is closed."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        return
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(f"another process is working on {what}.") from None


def _read_json(file: Path) -> Record:
    try:
        content: Record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"cannot read {file}: {error.strerror}.") from None
    except ValueError:
        raise LabError(f"{file} is damaged: it is not valid JSON.") from None
    return content
