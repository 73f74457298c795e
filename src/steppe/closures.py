"""Closures given to `optimizer.step`: the loss for all passes, or a piece of an unchanged loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steppe.passes import Closure, Run
from steppe.training import Training


class LossClosure:
    """Runs all passes over a closure that zeroes gradients and differentiates by itself, once."""

    def __init__(self, training: Training, closure: Closure) -> None:
        self._training, self._closure, self._used = training, closure, False

    def __call__(self) -> Any:
        training, method = self._training, self._training.method
        if self._used:
            raise RuntimeError(
                f"{type(training.optimizer).__name__} calls its closure more than once a step, which "
                "weight perturbation cannot serve."
            )
        self._used = True
        if method.feed != "one" or method.m:
            batches = "batch1, batch2" if method.feed == "each" else "batch"
            raise RuntimeError(
                f"{method.name}() cannot take its batches from a closure. Call "
                f"perturber.backward(loss_of, {batches}), then optimizer.step() without one."
            )
        training.new_step()  # passes from before the closure do not count
        with training.closure():
            loss = self._run_passes()
            training.step.settle()
        return loss

    def _run_passes(self) -> Any:
        """Gradients of earlier passes are put aside, since the closure zeroes, and added up."""
        training = self._training
        total: Any = None
        kept: dict[Any, Tensor | None] = {}
        for index, planned in enumerate(training.method.passes):
            training.set_gradients_aside()
            with Run(training, index, planned.weight), torch.enable_grad():
                loss = self._closure()
            for param, grad in training.set_gradients_aside().items():
                kept[param] = _sum(kept.get(param), grad)
            if planned.weight:
                if all(grad is None for grad in kept.values()):
                    raise RuntimeError(
                        "The closure given to optimizer.step() ran no backward, and gradients from "
                        "before it do not count. Let it call loss.backward(), or step without one."
                    )
                total = _sum(total, None if loss is None else planned.weight * loss)
        for param, grad in kept.items():
            param.grad = grad
        return total


class LoopClosure:
    """A closure whose passes the hooks run; afterwards the step is settled."""

    def __init__(self, training: Training, closure: Closure) -> None:
        self._training, self._closure = training, closure

    def __call__(self) -> Any:
        with self._training.closure():
            loss = self._closure()
            step = self._training.step
            step.idle = loss is None and not step.done
            if not step.idle:  # a closure that ran no pass and gives no loss skips its step
                step.settle()
        return loss


def _sum(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b
