"""Metrics of a model on a data set, at the true weights, without augmentation."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from steppe.lab.data import Split, sequential_order
from steppe.lab.tasks import Task

EVAL_BATCH = 256


def evaluate(
    model: nn.Module, split: Split, task: Task, *, limit: int | None = None, workers: int = 0
) -> dict[str, float]:
    """The task's metrics, and `loss`, over a split (or `limit` samples spread evenly over it)."""
    device = next(model.parameters()).device
    columns: dict[str, list[Tensor]] = defaultdict(list)
    total, count = 0.0, 0
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            order = _order(len(split), limit)
            for x, y in split.batches(order, augment_seed=None, workers=workers):
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                outputs = model(x)
                total += float(task.loss(outputs, y)) * len(y)
                count += len(y)
                for name, values in task.measure(outputs, y).items():
                    columns[name].append(values.detach().cpu())
    finally:
        model.train(training)
    joined = {name: torch.cat(parts) for name, parts in columns.items()}
    return {"loss": total / max(1, count), **task.summary(joined)}


def _order(n: int, limit: int | None) -> list[Tensor]:
    if limit is None or limit >= n:
        return sequential_order(n, EVAL_BATCH)
    return list((torch.arange(limit) * n // limit).split(EVAL_BATCH))
