"""Leaves: every parameter that gets gradients in a pass, perturbed or not, whoever trains it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steppe.distributed import is_sharded

if TYPE_CHECKING:
    from steppe.training import Training


class Leaves:
    """The model's parameters, the optimizer's, and further ones as they are met.

    A hook on each tells the step of a gradient before it accumulates. Sharded parameters see nothing
    of autograd: the gathered ones are watched in their place.
    """

    def __init__(self, training: Training) -> None:
        self._training, perturbed = training, [p.param for p in training.weights.params]
        self._numbers = {param: number for number, param in enumerate(perturbed)}
        self._sharded = [param for param in perturbed if is_sharded(param)]
        self._of_model = [p for p in training.model.parameters() if not is_sharded(p)]
        self._handles: dict[Tensor, Any] = {}
        self._met: dict[Tensor, None] = {}
        self._all: dict[Tensor, None] = {}
        self._key: tuple[int, ...] = ()
        self._met_optimizers = False
        self._first = set(_trained_by(training.optimizer))
        self._count = len(self._first)

    def __iter__(self) -> Iterator[Tensor]:
        optimizer = self._training.optimizer
        key = (len(self._met), *[len(group["params"]) for group in optimizer.param_groups])
        if key != self._key:
            theirs = (p for p in _trained_by(optimizer) if not is_sharded(p))
            self._all, self._key = dict.fromkeys((*self._of_model, *theirs, *self._met)), key
        return iter(self._all)

    # ------------------------------------------------------------------ watching

    def watch_all(self) -> None:
        """Watch whatever requires gradients by now: a frozen parameter refuses a hook."""
        for leaf in self:
            self.watch(leaf)

    def watch(self, leaf: Tensor, number: int | None = None) -> None:
        """`number`: of the perturbed parameter that this leaf was gathered from."""
        if leaf.requires_grad and leaf not in self._handles:
            number = self._numbers.get(leaf, number)  # type: ignore[call-overload]
            hook = partial(_arrive, ref(self._training), number, ref(leaf))
            self._handles[leaf] = leaf.register_hook(hook)
            self._met[leaf] = None

    def meet_optimizers(self) -> None:
        """Find what other optimizers train: what none of them holds needs no weighing.

        torch keeps no list of optimizers, so they are looked for, once, among all objects.
        """
        if self._met_optimizers:
            return
        self._met_optimizers = True
        for found in gc.get_referrers(*_kinds(Optimizer)):
            if isinstance(found, Optimizer) and hasattr(found, "param_groups"):
                self._met |= {p: None for p in _trained_by(found) if not is_sharded(p)}

    def meet_graph(self, loss: Tensor) -> None:
        """Find the leaves of this graph that nobody named (a criterion's weights)."""
        seen, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and not is_sharded(leaf):
                self._met[leaf] = None
            todo += [following for following, _ in node.next_functions]

    # ------------------------------------------------------------------ gradients

    @property
    def gradients(self) -> list[Tensor]:
        return [grad for leaf in self if (grad := leaf.grad) is not None]

    @property
    def have_gradients(self) -> bool:
        return any(leaf.grad is not None for leaf in (*self, *self._sharded))

    @property
    def hooked(self) -> bool:
        """Whether somebody else looks at gradients as they accumulate, and must see sums."""
        return any(leaf._post_accumulate_grad_hooks for leaf in self)

    def set_aside(self) -> dict[Tensor, Tensor]:
        """Take all gradients away."""
        ddp, aside = self._training.ranks.ddp, {}
        copy = ddp is not None and ddp.gradient_as_bucket_view  # DDP reuses their memory
        for leaf in (*self, *self._sharded):
            if (grad := leaf.grad) is not None:
                aside[leaf] = grad.clone() if copy else grad
                leaf.grad = None
        return aside

    @torch.no_grad()
    def give_back(self, aside: dict[Tensor, Tensor], weight: float | None = None) -> None:
        """Add gradients that were put aside to those found now (times `weight`), by few operations."""
        if weight is not None:
            for leaf in (*self, *self._sharded):
                if (new := leaf.grad) is not None:
                    leaf.grad = new * weight if weight else None
        found = [(leaf, old, leaf.grad) for leaf, old in aside.items()]
        pairs = [(old, new) for _, old, new in found if new is not None and _plain(old, new)]
        if pairs:
            torch._foreach_add_([old for old, _ in pairs], [new for _, new in pairs])
        for leaf, old, new in found:
            leaf.grad = old if new is None or _plain(old, new) else old + new

    # ------------------------------------------------------------------ changes

    def added(self) -> list[str]:
        """Parameters that came to the optimizer after `attach`: trained, but not perturbed."""
        new = [p for p in _trained_by(self._training.optimizer) if p not in self._first]
        names = {param: name for name, param in self._training.model.named_parameters()}
        return [names.get(param, f"a parameter {tuple(param.shape)}") for param in new]

    def notice_added(self) -> None:
        """Warn once of parameters that came to the optimizer after `attach`."""
        count = sum(len(group["params"]) for group in self._training.optimizer.param_groups)
        if count > self._count:
            warnings.warn(
                f"{count - self._count} parameters were added to the optimizer after attach(): they "
                "are trained, but not perturbed. To perturb them too, detach() and attach() again.",
                stacklevel=2,
            )
        self._count = count

    def let_go(self) -> None:
        """Remove all hooks and forget the model."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._met.clear()
        self._all, self._key, self._of_model = {}, (), []


def _arrive(
    training: ref[Training], number: int | None, leaf: ref[Tensor], grad: Tensor
) -> Tensor | None:
    """A leaf's hook. It must keep nothing alive: under DDP the cycle from a parameter through its
    hook back to the parameter runs through C++, where nothing collects it."""
    alive, param = training(), leaf()
    return None if alive is None or param is None else alive.step.arrive(number, param, grad)


def _trained_by(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _plain(*tensors: Tensor) -> bool:
    """Whether one operation can serve these among others: neither sparse nor sharded."""
    return all(type(t) is Tensor and t.layout is torch.strided for t in tensors)


def _kinds(kind: type) -> set[type]:
    below: list[type] = kind.__subclasses__()
    return {kind}.union(*map(_kinds, below))
