"""What a run ended with."""

from __future__ import annotations

import html
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from steppe.lab.config import Config, as_config
from steppe.lab.errors import LabError
from steppe.lab.naming import shown_name
from steppe.lab.runs import Run, Store

Compressed = dict[str, dict[str, dict[str, float]]]
"""Metrics by BatchNorm's statistics ("as is", "recalibrated") and by change ("4 bits, per filter")."""


@dataclass(frozen=True)
class Result:
    """A finished (or diverged) run: its config, final metrics by split, and what it cost."""

    config: Config
    status: Literal["finished", "diverged"]
    metric: str
    higher_is_better: bool
    unit: str
    metrics: dict[str, dict[str, float]]
    """Metrics of the final model by split: train, test, validation, and *_recomputed."""
    steps: int
    seconds: float
    """Time in training steps, without evaluation."""
    cpu_seconds: float
    """Processor time of the same."""
    flops: int
    """Per optimizer step, all passes."""
    parameters: int
    strength: tuple[str, float] | None = None
    """The kind and value of the method's strength, `("ratio", 0.6)`."""
    perturbation: dict[str, float] = field(default_factory=dict)
    """What the perturber did, averaged over the epochs: strength, radius ‖eps‖ …"""
    compressed: Compressed = field(default_factory=dict)
    """Test metrics after rounding and pruning, if they were measured."""
    data_note: str = ""
    message: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    reused: bool = False

    @property
    def cost_seconds(self) -> float:
        """Time as costs are compared by: of one process on one CPU thread processor time, which
        other programs on the machine do not stretch; else time on the wall."""
        one_rank = self.environment.get("ranks", 1) == 1
        alone = one_rank and self.config.device == "cpu" and self.config.threads == 1
        return self.cpu_seconds if alone else self.seconds

    @property
    def machine(self) -> dict[str, Any]:
        """Where it ran, as far as its time depends on that: the environment but for steppe's code."""
        ours = ("steppe", "commit")
        return {name: value for name, value in self.environment.items() if name not in ours}

    def score(self, split: str = "test") -> float:
        """The deciding metric on a split."""
        if split not in self.metrics:
            raise LabError(f"this run has no metrics on {split!r}, only {', '.join(self.metrics)}.")
        return self.metrics[split][self.metric]

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; `from_record` is the way back."""
        apart = ("config", "folder", "reused")
        content = {name: value for name, value in vars(self).items() if name not in apart}
        return {**content, "config": self.config.to_dict()}

    def table(self) -> str:
        """The final metrics, one line per split."""
        about = f"{shown_name(self.config.data)} · {shown_name(self.config.model)}"
        lines = [f"{about} · {self.config.method} · seed {self.config.seed}"]
        if self.status == "diverged":
            return "\n".join([*lines, f"diverged: {self.message}"])
        for split, values in self.metrics.items():
            shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            lines.append(f"{split:10} {shown}")
        lines.append(f"{'cost':10} {self.steps} steps in {self.seconds:.1f} s of training")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table())}</pre>"


def from_record(content: dict[str, Any], folder: Path | None = None) -> Result:
    """A result from its `to_dict`."""
    strength = content["strength"] and tuple(content["strength"])
    values = {**content, "config": as_config(content["config"]), "strength": strength}
    return Result(**values, folder=folder, reused=True)


def stored(run: Run) -> Result | None:
    """The result of a run in the store, if it has one."""
    if (content := run.result) is None:
        return None
    return from_record({**content, "compressed": run.compressed}, run.folder)


def readable(store: Store) -> list[Result]:
    """The results in a store, without those that another version has written."""
    found: list[Result] = []
    for run in store.runs():
        with suppress(LabError):
            found += filter(None, [stored(run)])
    return found


def by_experiment(results: Iterable[Result]) -> dict[str, dict[int, Result]]:
    """The results of each experiment by seed."""
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        found.setdefault(result.config.experiment, {}).setdefault(result.config.seed, result)
    return found
