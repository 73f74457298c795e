"""What `torchrun` says about this process, read before torch is imported."""

from __future__ import annotations

import os


def rank_and_size() -> tuple[int, int]:
    """This process among those that torchrun started; (0, 1) for a process on its own."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2 or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), size
