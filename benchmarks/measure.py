"""What the benchmarks share: where a number came from, medians with their spread, JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import steppe

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Machine, versions, load and date: no number without them."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "steppe": steppe.__version__,
        "load": round(load, 2),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def busy(processes: int = 0) -> bool:
    """Whether others use the machine so much that its timings should not be published."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > processes + 0.5


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of some measurements."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return {
        "median": statistics.median(ordered),
        "low": ordered[quarter],
        "high": ordered[-1 - quarter],
        "n": len(ordered),
    }


def write(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Save a result as JSON, by default among the published ones."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(), **result}, indent=2) + "\n", encoding="utf-8")
    return path
