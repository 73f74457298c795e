"""Tasks: the loss to train on, the numbers to report and which way is better; and evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steppe.analysis.calibration import calibration_error
from steppe.lab.data import Split, sequential_order
from steppe.lab.errors import LabError, explained, unknown
from steppe.lab.naming import user_function

EVAL_BATCH = 256

Columns = Mapping[str, Tensor]
"""One number per sample under each name."""


def means(columns: Columns) -> dict[str, float]:
    """The mean of each column."""
    return {name: float(values.double().mean()) for name, values in columns.items()}


@dataclass(frozen=True)
class Task:
    """A loss, per-sample measurements, their summary, and the metric that decides.

    `loss(outputs, targets)` is a mean over the batch. `measure` gives one number per sample and
    name; `summary` turns those of a whole data set into metrics (the mean of each by default).
    `metric` is the one that tables, tuning and statistics use; `unit` follows its differences.

    A task of your own, for `--task mymodule:counts`:

    >>> def counts() -> Task:
    ...     return Task(
    ...         name="counts",
    ...         loss=lambda out, y: F.poisson_nll_loss(out.squeeze(1), y),
    ...         measure=lambda out, y: {"mae": (out.squeeze(1).exp() - y).abs()},
    ...         metric="mae",
    ...         higher_is_better=False,
    ...     )
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    measure: Callable[[Tensor, Tensor], Columns]
    metric: str
    higher_is_better: bool
    summary: Callable[[Columns], dict[str, float]] = means
    unit: str = ""


def _class_columns(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    outputs = outputs.float()
    confidence, predicted = outputs.softmax(dim=1).max(dim=1)
    return {
        "correct": (predicted == targets).float(),
        "nll": F.cross_entropy(outputs, targets, reduction="none"),
        "confidence": confidence,
    }


def _class_summary(columns: Columns) -> dict[str, float]:
    correct = columns["correct"]
    return {
        "accuracy": 100 * float(correct.double().mean()),
        "nll": float(columns["nll"].double().mean()),
        "ece": 100 * calibration_error(columns["confidence"], correct),
    }


def _like(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs in the shape of the targets: (n, 1) for (n,) is the usual case."""
    if outputs.numel() != targets.numel():
        raise LabError(
            f"the model gives {tuple(outputs.shape)} for targets of shape {tuple(targets.shape)}: "
            "a regression needs one output per target number."
        )
    return outputs.reshape(targets.shape)


def _error_columns(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    error = (_like(outputs, targets) - targets).reshape(len(targets), -1)
    return {"squared": error.square().mean(1), "mae": error.abs().mean(1)}


def _error_summary(columns: Columns) -> dict[str, float]:
    return {
        "rmse": float(columns["squared"].double().mean().sqrt()),
        "mae": float(columns["mae"].double().mean()),
    }


TASKS = {
    "classification": Task(
        name="classification",
        loss=F.cross_entropy,
        measure=_class_columns,
        metric="accuracy",  # in per cent
        higher_is_better=True,
        summary=_class_summary,
        unit="points",
    ),
    "regression": Task(
        name="regression",
        loss=lambda outputs, targets: F.mse_loss(_like(outputs, targets), targets),
        measure=_error_columns,
        metric="rmse",
        higher_is_better=False,
        summary=_error_summary,
    ),
}


def get(name: str) -> Task:
    """The task of this name; `module:function` calls the user's function, which returns a `Task`."""
    if name in TASKS:
        return TASKS[name]
    if ":" not in name:
        raise unknown("task", name, (*TASKS, "module:function"))
    with explained(f"task {name!r}"):
        task = user_function(name)()
    if not isinstance(task, Task):
        raise LabError(f"{name} must return a steppe.lab.Task, got {type(task).__name__}.")
    return task


def evaluate(
    model: nn.Module, split: Split, task: Task, *, limit: int | None = None, workers: int = 0
) -> dict[str, float]:
    """The task's metrics, and `loss`, over a split (or `limit` samples spread evenly over it)."""
    device = next(model.parameters()).device
    order = sequential_order(len(split), EVAL_BATCH)
    if limit is not None and limit < len(split):
        order = list((torch.arange(limit) * len(split) // limit).split(EVAL_BATCH))
    columns: dict[str, list[Tensor]] = defaultdict(list)
    total, count = 0.0, 0
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
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
