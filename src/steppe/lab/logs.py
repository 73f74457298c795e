"""Where the metrics of each epoch go: the run's metrics.jsonl, and TensorBoard if it is installed."""

from __future__ import annotations

import importlib.util
import logging
from contextlib import AbstractContextManager
from typing import Any

from steppe.lab.runs import Record, Run

logger = logging.getLogger("steppe")


class MetricLog(AbstractContextManager["MetricLog"]):
    """Takes one flat record per epoch."""

    def __init__(self, run: Run | None) -> None:
        self.run = run
        self.board: Any = None
        if run is not None and importlib.util.find_spec("tensorboard") is not None:
            self.board = _board(run)

    def __call__(self, record: Record) -> None:
        if self.run is not None:
            self.run.append_metrics(record)
        if self.board is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name not in ("step", "epoch"):
                    self.board.add_scalar(name, value, record["step"])

    def __exit__(self, *_: object) -> None:
        if self.board is not None:
            self.board.close()


def _board(run: Run) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        logger.warning("tensorboard is installed but does not import (%s): no log for it", error)
        return None
    return SummaryWriter(str(run.folder / "tensorboard"))
