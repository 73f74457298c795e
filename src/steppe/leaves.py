"""Leaves: every parameter that gets gradients in a pass, perturbed or not, whoever trains it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steppe.layout import is_sharded

Arrive = Callable[[int | None, Tensor, Tensor], Tensor | None]


class Leaves:
    """The model's parameters, the optimizer's, and further ones as they are met.

    A hook on each tells `arrive` of a gradient before it accumulates. Sharded parameters see nothing
    of autograd: the gathered ones are watched in their place.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        perturbed: Sequence[nn.Parameter],
        arrive: Arrive,
    ) -> None:
        self._model, self._optimizer, self._arrive = model, optimizer, arrive
        self._numbers = {param: number for number, param in enumerate(perturbed)}
        self._sharded = [param for param in perturbed if is_sharded(param)]
        self._of_model = [p for p in model.parameters() if not is_sharded(p)]
        self._handles: dict[Tensor, Any] = {}
        self._met: dict[Tensor, None] = {}
        self._all: dict[Tensor, None] = {}
        self._key: tuple[int, ...] = ()
        self._met_optimizers = False
        self._first = set(self._of_optimizer(optimizer))
        self._count = len(self._first)

    def __iter__(self) -> Iterator[Tensor]:
        groups = self._optimizer.param_groups
        key = (len(self._met), *(len(group["params"]) for group in groups))
        if key != self._key:
            theirs = (p for p in self._of_optimizer(self._optimizer) if not is_sharded(p))
            self._all, self._key = dict.fromkeys((*self._of_model, *theirs, *self._met)), key
        return iter(self._all)

    @staticmethod
    def _of_optimizer(optimizer: Optimizer) -> Iterator[nn.Parameter]:
        return (p for group in optimizer.param_groups for p in group["params"])

    # ------------------------------------------------------------------ watching

    def watch_all(self) -> None:
        """Watch whatever requires gradients by now: a frozen parameter refuses a hook."""
        for leaf in self:
            self.watch(leaf)

    def watch(self, leaf: Tensor, number: int | None = None) -> None:
        """`number`: of the perturbed parameter that this leaf was gathered from."""
        if leaf.requires_grad and leaf not in self._handles:
            number = self._numbers.get(leaf, number)  # type: ignore[call-overload]
            hook = partial(_arrive, WeakMethod(self._arrive), number, ref(leaf))
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
                self._met |= {p: None for p in self._of_optimizer(found) if not is_sharded(p)}

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
        return [leaf.grad for leaf in self if leaf.grad is not None]

    def set_aside(self, *, copy: bool) -> dict[Tensor, Tensor | None]:
        """Take all gradients away. `copy`: DDP reuses the memory of its bucket views."""
        aside = {}
        for leaf in (*self, *self._sharded):
            aside[leaf] = leaf.grad.clone() if copy and leaf.grad is not None else leaf.grad
            leaf.grad = None
        return aside

    @property
    def hooked(self) -> bool:
        """Whether somebody else looks at gradients as they accumulate, and must see sums."""
        return any(leaf._post_accumulate_grad_hooks for leaf in self)

    @contextmanager
    def added_at_once(self, possible: bool, keep: Callable[[], None]) -> Iterator[None]:
        """Around one backward: gradients from before are put aside and added by one operation for
        all, where autograd would add them one by one. `keep` is called before they are added."""
        if not possible:
            yield
            return
        before = {leaf: leaf.grad for leaf in self if leaf.grad is not None}
        for leaf in before:
            leaf.grad = None
        try:
            yield
            keep()
        finally:
            pairs = [(old, leaf.grad) for leaf, old in before.items() if leaf.grad is not None]
            dense = [(a, b) for a, b in pairs if not (a.is_sparse or b.is_sparse)]
            with torch.no_grad():
                if dense:
                    torch._foreach_add_([a for a, _ in dense], [b for _, b in dense])
            for leaf, old in before.items():
                new = leaf.grad
                alone = new is None or not (old.is_sparse or new.is_sparse)
                leaf.grad = old if alone or new is None else old + new

    # ------------------------------------------------------------------ changes

    def added(self) -> list[str]:
        """Parameters that came to the optimizer after `attach`: trained, but not perturbed."""
        new = [p for p in self._of_optimizer(self._optimizer) if p not in self._first]
        names = {param: name for name, param in self._model.named_parameters()}
        return [names.get(param, f"a parameter {tuple(param.shape)}") for param in new]

    def notice_added(self) -> None:
        """Warn once of parameters that came to the optimizer after `attach`."""
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
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
        self._all, self._key, self._of_model, self._model = {}, (), [], nn.Module()


def _arrive(
    arrive: WeakMethod[Arrive], number: int | None, leaf: ref[Tensor], grad: Tensor
) -> Tensor | None:
    """A leaf's hook. It must keep nothing alive: under DDP the cycle from a parameter through its
    hook back to the parameter runs through C++, where nothing collects it."""
    alive, param = arrive(), leaf()
    return None if alive is None or param is None else alive(number, param, grad)


def _kinds(kind: type) -> set[type]:
    below: list[type] = kind.__subclasses__()
    return {kind}.union(*map(_kinds, below))
