"""Passes run by hand: one at a time (`with run:`), from a loss and its batches, from a closure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from steppe.methods import Method
from steppe.step import EARLY, Running
from steppe.training import Training

Closure = Callable[[], Any]


class Run:
    """One pass, entered and left by the user: `with run: loss_fn(model(x), y).backward()`.

    `weighs_loss`: its weight is multiplied into the loss by `run.backward`, which reaches every leaf,
    instead of into the gradients at the leaves that are known.
    """

    def __init__(
        self,
        training: Training,
        index: int,
        factor: float,
        *,
        by_hooks: bool = False,
        weighs_loss: bool = False,
    ) -> None:
        planned = training.method.passes[index]
        self.index, self.weight = index, planned.weight
        self.perturbed = planned.perturbation is not None
        self._training, self._factor = training, factor
        self._by_hooks, self._weighs_loss = by_hooks, weighs_loss
        self._scouts = training.method.scouts(index)
        self._share = factor if weighs_loss and factor and not self._scouts else 1.0
        self._running: Running | None = None
        self._aside: dict[Tensor, Tensor] = {}
        self._quiet: AbstractContextManager[Any] | None = None

    def __repr__(self) -> str:
        kind = "perturbed" if self.perturbed else "clean"
        return f"Run({self.index}, {kind}, weight={self.weight:g})"

    def __enter__(self) -> Run:
        training = self._training
        if training.holding is not None:
            open_run = training.holding.held
            raise RuntimeError(f"{open_run} is still open; leave it before entering {self}.")
        if self._running is not None:
            raise RuntimeError(f"{self} was entered before; take a new one from passes().")
        noise = training.method.passes[self.index].perturbation
        if noise is not None and noise.needs_gradient and not training.step.gradient:
            raise RuntimeError(f"{self} needs the gradient of the pass before it; run that first.")
        factor = 1.0 if self._scouts else self._factor / self._share
        apart = self._weighs_loss and factor == 1 and training.several and self._ours()
        if self._scouts:
            if not self._weighs_loss:
                training.leaves.meet_optimizers()
            self._aside = training.leaves.set_aside()
            self._quiet = training.ranks.scouting()
            self._quiet.__enter__()
        try:
            self._running = training.begin(
                self.index, factor, share=self._share, held=self, apart=apart
            )
            training.holding = self._running
            training.step.by_hooks = self._by_hooks
        except BaseException:
            training.restore()
            self._give_back()
            raise
        return self

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss of this pass, scaled as scaler and weights ask."""
        training = self._training
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss_of must return the loss, a tensor with one value; got {got}.")
        leaves, running = training.leaves, self._running or Running(self.index)
        if training.number < EARLY and (self._scouts or running.factor != 1):
            leaves.meet_graph(loss)
            if not running.apart:
                leaves.watch_all()
            if self._scouts:
                self._aside |= leaves.set_aside()
        training.step.loss_unscaled |= training.scaler is None
        loss = loss if self._share == 1 else loss * self._share
        loss = loss if training.scaler is None else training.scaler.scale(loss)
        # those from before are added by one operation for all, where autograd would add one by one
        ours = leaves.have_gradients and (running.apart or self._ours())
        before = leaves.set_aside() if ours else {}
        try:
            loss.backward()
            training.step.backward_ends(running)
        finally:
            if before:
                leaves.give_back(before)

    def _ours(self) -> bool:
        """Whether gradients of passes are put aside for each other and added up by us."""
        return not (self._training.ranks.averages or self._training.leaves.hooked)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._training.holding = None
        try:
            if kind is None:
                self._close()
        finally:
            self._training.restore()
            self._give_back()

    def _close(self) -> None:
        training, running = self._training, self._running
        if running is None or training.step.running is not running:
            raise RuntimeError(put_back(self))
        if training.several and not running.reached:
            raise RuntimeError(f"No gradient arrived in {self}; call backward() inside of it.")
        training.finish(running)
        if self._scouts:
            training.step.gradient = [slot.param.grad for slot in training.weights.active]

    def _give_back(self) -> None:
        """Give back the gradients that were there before a pass that shows the next one its way."""
        if self._quiet is not None:
            self._quiet.__exit__(None, None, None)
            self._training.leaves.give_back(self._aside, self._factor)
            self._aside, self._quiet = {}, None


def put_back(run: object) -> str:
    """What is said of a pass whose weights somebody put back."""
    return (
        f"The weights were put back in the middle of {run}, by an evaluation or state_dict(). Do that "
        "outside of the pass."
    )


# ---------------------------------------------------------------------- what each pass runs on


class Work(NamedTuple):
    """The number of a pass to run, the arguments of its loss, and the factor of its gradient."""

    number: int
    arguments: Sequence[Any]
    factor: float


def deal(method: Method, batches: tuple[Any, ...], only: int | None = None) -> list[Work]:
    """Which pass runs on what, in order; raises and says what to pass if the number is wrong.

    `only`: the one pass that this rank runs, where passes run on different ranks.
    """
    if only is not None:
        if len(batches) > 1:
            raise ValueError(
                f"{method.name}() runs its passes on different ranks, and every rank brings one batch "
                f"of its own; got {len(batches)}. Call perturber.backward(loss_of, batch)."
            )
        weight = method.passes[only].weight * len(method.passes)
        return [Work(only, _arguments(batches[0]) if batches else (), weight)]
    if method.feed == "each":
        if len(batches) != len(method.passes):
            names = ", ".join(f"batch{i + 1}" for i in range(len(method.passes)))
            raise ValueError(
                f"{method.name}() takes a batch for each of its {len(method.passes)} passes, got "
                f"{len(batches)}. Call perturber.backward(loss_of, {names})."
            )
        return [Work(i, _arguments(batches[i]), p.weight) for i, p in enumerate(method.passes)]
    sliced = method.m is not None or method.feed == "slices"
    if len(batches) > 1 or (sliced and not batches):
        raise ValueError(
            f"{method.name}() takes one batch, got {len(batches)}. Call "
            "perturber.backward(loss_of, batch)."
        )
    batch = _arguments(batches[0]) if batches else ()
    if method.feed == "slices":
        parts = slices(batch, len(method.passes))
        return [Work(i, part, share) for i, (part, share) in enumerate(parts)]
    parts = [(batch, 1.0)] if method.m is None else slices(batch, of=method.m)
    return [
        Work(i, part, p.weight * share)
        for part, share in parts
        for i, p in enumerate(method.passes)
    ]


def slices(
    batch: Sequence[Any], parts: int | None = None, *, of: int = 1
) -> list[tuple[Sequence[Any], float]]:
    """The batch along dimension 0 in so many equal `parts`, or in parts `of` so many samples,
    each with its share of the samples.

    Examples:
        >>> [(part[0].tolist(), share) for part, share in slices([torch.arange(5)], of=4)]
        [([0, 1, 2, 3], 0.8), ([4], 0.2)]
    """
    size = _batch_size(batch)
    if parts is not None and parts > size:
        raise ValueError(f"A batch of {size} cannot be cut into {parts} slices.")
    if parts is None:
        bounds = [*range(0, size, of), size]
    else:
        bounds = [i * size // parts for i in range(parts + 1)]
    return [
        (
            pytree.tree_map(lambda leaf, a=start, b=stop: _rows(leaf, a, b), list(batch)),
            (stop - start) / size,
        )
        for start, stop in pairwise(bounds)
    ]


def _batch_size(batch: Sequence[Any]) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(list(batch)) if isinstance(leaf, Tensor)]
    sizes = {leaf.shape[0] for leaf in leaves if leaf.dim()}
    if len(sizes) != 1:
        raise ValueError(
            f"A batch that is sliced must hold tensors of one size along dimension 0, got sizes "
            f"{sorted(sizes)}."
        )
    return int(sizes.pop())


def _rows(leaf: Any, start: int, stop: int) -> Any:
    return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _arguments(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, list | tuple) else (batch,)


# ---------------------------------------------------------------------- what a loss function gave


class Answer(NamedTuple):
    """What `loss_of` returned in a pass, the factor of that pass, and whether it ran at the true weights."""

    value: Any
    factor: float
    clean: bool

    @property
    def loss(self) -> Any:
        """The loss: all there is, or first in a tuple, or "loss" in a mapping."""
        if isinstance(self.value, Mapping):
            return self.value.get("loss")
        first = isinstance(self.value, list | tuple) and self.value
        return self.value[0] if first else self.value


def joined(answers: Sequence[Answer]) -> Any:
    """The loss that the method minimises, and what stood beside it, without graphs: from the true
    weights where a pass runs at them, as lists where the batch was sliced."""
    parts = [a.loss.detach() if a.factor == 1 else a.loss.detach() * a.factor for a in answers]
    total = reduce(torch.add, parts)
    kept = [a.value for a in answers if a.clean] or [a.value for a in answers]
    if isinstance(kept[0], Tensor):
        return total
    if isinstance(kept[0], Mapping):
        beside = {k: _together([a[k] for a in kept]) for k in kept[0] if k != "loss"}
        return {"loss": total, **beside}
    return (total, *(_together(parts) for parts in list(zip(*kept, strict=True))[1:]))


def _together(parts: Sequence[Any]) -> Any:
    def without_graph(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    parts = [pytree.tree_map(without_graph, part) for part in parts]
    return parts[0] if len(parts) == 1 else parts


# ---------------------------------------------------------------------- closures


def loss_closure(training: Training, closure: Closure) -> Any:
    """Run all passes over a closure that zeroes gradients and differentiates by itself, once."""
    method, leaves = training.method, training.leaves
    if training.step.settled:
        raise RuntimeError(
            f"{type(training.optimizer).__name__} calls its closure more than once a step, which "
            "weight perturbation cannot serve."
        )
    if method.feed != "one" or method.m:
        batches = "batch1, batch2" if method.feed == "each" else "batch"
        raise RuntimeError(
            f"{method.name}() cannot take its batches from a closure. Call "
            f"perturber.backward(loss_of, {batches}), then optimizer.step() without one."
        )
    training.new_step()  # passes from before the closure do not count, nor do their gradients
    leaves.set_aside()
    total: Any = None
    with _within_step(training):
        for index, planned in enumerate(method.passes):
            before = leaves.set_aside()  # the closure zeroes them
            with Run(training, index, planned.weight), torch.enable_grad():
                loss = closure()
            leaves.give_back(before)
            if planned.weight and not leaves.have_gradients:
                raise RuntimeError(
                    "The closure given to optimizer.step() ran no backward, and gradients from "
                    "before it do not count. Let it call loss.backward(), or step without one."
                )
            if planned.weight and loss is not None:
                part = planned.weight * loss
                total = part if total is None else total + part
        training.step.settle()
    return total


def loop_closure(training: Training, closure: Closure) -> Any:
    """Run a closure whose passes the hooks run, and settle the step."""
    with _within_step(training):
        loss, step = closure(), training.step
        step.idle = loss is None and not step.done
        if not step.idle:  # a closure that ran no pass and gives no loss skips its step
            step.settle()
    return loss


@contextmanager
def _within_step(training: Training) -> Iterator[None]:
    """Around a closure that the optimizer calls: passes within its step are its own."""
    training.in_closure = True
    try:
        yield
    except BaseException:
        training.stepping = 0
        training.new_step()
        raise
    finally:
        training.in_closure = False
