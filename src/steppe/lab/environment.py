"""Where a run ran: versions, commit, processor."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

import steppe
from steppe.lab.ranks import world


def describe(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge or repeat a number."""
    return {
        "steppe": steppe.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "simd": torch.backends.cpu.get_cpu_capability(),  # kernels, and so the last bits, follow it
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": world().size,
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


@cache
def commit() -> str | None:
    """The commit steppe's source is at, with `+` if files differ from it; None if installed."""
    folder = Path(__file__).resolve().parent
    try:
        _git(folder, "ls-files", "--error-unmatch", "environment.py")  # not somebody else's commit
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
