"""Passes: what one does while it is under way, and the leaves whose gradients it gets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from steppe.batchnorm import Held
from steppe.distributed import alive, is_sharded
from steppe.standins import ASKS, ScalerAsks

if TYPE_CHECKING:
    from steppe.training import Training

EARLY = 2
"""Steps in which everything is looked at twice, also what costs a wait for the device."""


class Run:
    """One pass. While it is under way its eps is in the weights, and gradients that arrive are its own.

    `held`: entered and left by the user, `with run: loss_fn(model(x), y).backward()`; otherwise the
    model's forward begins it. `weighs_loss`: its weight is multiplied into the loss by `run.backward`,
    which reaches every leaf, instead of into the gradients at the leaves that are known.
    """

    def __init__(
        self,
        training: Training,
        index: int,
        factor: float,
        *,
        held: bool = True,
        by_hooks: bool = False,
        weighs_loss: bool = False,
    ) -> None:
        planned = training.method.passes[index]
        self.index, self.weight, self.noise = index, planned.weight, planned.perturbation
        self.perturbed, self.held = self.noise is not None, held
        self._training, self._of_pass = training, factor
        self._by_hooks, self._weighs_loss = by_hooks, weighs_loss
        self._scouts = held and training.method.scouts(index)
        self.share = factor if weighs_loss and factor and not self._scouts else 1.0
        """What its gradients are multiplied by already, through the loss."""
        self.factor = 1.0 if self._scouts else factor / self.share
        """What they are multiplied by as they arrive at the leaves."""
        self.apart = False
        """Whether all gradients are its own when backward ends, so that none is looked at before."""
        self.statistics = Held()
        self.in_backward = self.end_is_queued = self.learns = False
        self.reached = False
        """Whether a gradient arrived at any leaf."""
        self.own: dict[int, Tensor | None] = {}
        """Its own gradients, where something is learnt from them, by the number of the parameter; None:
        what is in `.grad`, where there was nothing before."""
        self.looked_at = False  # whether these served already
        self.pull: Tensor | None = None
        """The sum of |dL/dz| over the model's outputs, where a rise is steered by it."""
        self.losses: list[Tensor] = []
        """Single numbers among the outputs: what stands for it where nothing else is differentiated."""
        self.forwarded = False
        """Whether the model's forward is over and its backward has not begun."""
        self._entered = False
        self._aside: dict[Tensor, Tensor] = {}
        """The gradients from before a pass that shows the next one its way: its own do not count."""
        self._exits = ExitStack()

    def __repr__(self) -> str:
        kind = "perturbed" if self.perturbed else "clean"
        return f"Run({self.index}, {kind}, weight={self.weight:g})"

    def __enter__(self) -> Run:
        training = self._training
        if (held := training.holding) is not None:
            raise RuntimeError(
                f"{held} is still open. Leave it before entering {self}, or call perturber.restore() if Ctrl-C came."
            )
        if self._entered:
            raise RuntimeError(f"{self} was entered before; take a new one from passes().")
        if self.noise is not None and self.noise.needs_gradient and not training.step.gradient:
            raise RuntimeError(f"{self} needs the gradient of the pass before it; run that first.")
        ours = self._weighs_loss and self.factor == 1 and training.several
        self.apart = ours and self._adds_up()
        with ExitStack() as exits:
            exits.callback(setattr, training, "holding", None)
            if self._scouts:
                if not self._weighs_loss:
                    training.leaves.meet_optimizers()
                self._aside = training.leaves.set_aside()
                exits.callback(self._aside.clear)
                exits.callback(training.leaves.give_back, self._aside, self._of_pass)
                exits.enter_context(training.ranks.scouting())
            exits.callback(training.restore)
            training.begin(self)
            training.holding, self._entered = self, True
            training.step.by_hooks = self._by_hooks
            self._exits = exits.pop_all()
        return self

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss of this pass, scaled as scaler and weights ask."""
        training, leaves = self._training, self._training.leaves
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss_of must return the loss, a tensor with one value; got {got}.")
        if training.number < EARLY and (self._scouts or self.factor != 1):
            leaves.meet_graph(loss)
            if not self.apart:
                leaves.watch_all()
            if self._scouts:
                self._aside |= leaves.set_aside()
        training.step.loss_unscaled |= training.scaler is None
        loss = loss if self.share == 1 else loss * self.share
        loss = loss if training.scaler is None else training.scaler.scale(loss)
        # those from before are added by one operation for all, where autograd would add one by one
        ours = leaves.have_gradients and (self.apart or self._adds_up())
        before = leaves.set_aside() if ours else {}
        try:
            loss.backward()
            training.step.backward_ends(self)
        finally:
            if before:
                leaves.give_back(before)

    def _adds_up(self) -> bool:
        """Whether gradients of passes are put aside for each other and added up by us."""
        return not (self._training.ranks.averages or self._training.leaves.hooked)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._exits:
            if kind is None:
                self._close()

    def _close(self) -> None:
        training = self._training
        if training.step.running is not self:
            raise RuntimeError(put_back(self))
        if training.several and not self.reached:
            raise RuntimeError(f"No gradient arrived in {self}; call backward() inside of it.")
        training.finish(self)
        if self._scouts:
            training.step.gradient = [slot.param.grad for slot in training.weights.active]


def put_back(run: Run) -> str:
    """What is said of a pass whose weights somebody put back."""
    return (
        f"The weights were put back in the middle of {run}, by an evaluation or state_dict(). Do that "
        "outside of the pass, or call perturber.restore() if Ctrl-C came in between."
    )


class Leaves:
    """Every parameter that gets gradients, perturbed or not, whoever trains it: the model's, the
    optimizer's, and further ones as they are met.

    A hook on each tells the step of a gradient before it accumulates. Sharded parameters see nothing
    of autograd: the gathered ones are watched in their place.
    """

    def __init__(self, training: Training) -> None:
        self._training, perturbed = training, [p.param for p in training.weights.params]
        self.numbers = {param: number for number, param in enumerate(perturbed)}
        """Which of the perturbed parameters each is."""
        self._sharded = [param for param in perturbed if is_sharded(param)]
        self._handles: dict[Tensor, Any] = {}
        self._all: dict[Tensor, None] = {}
        self._met_optimizers = False
        self._first = set(_trained_by(training.optimizer))
        self._count = self._met = len(self._first)
        self._meet((*training.model.parameters(), *_trained_by(training.optimizer)))
        self.ours = set(self._all)
        """Those of the model and its optimizer; the others may have gradients of another step."""

    def __iter__(self) -> Iterator[Tensor]:
        groups = self._training.optimizer.param_groups
        if (count := sum([len(group["params"]) for group in groups])) != self._met:
            self._meet(_trained_by(self._training.optimizer))
            self.ours.update(_trained_by(self._training.optimizer))
            self._met = count
        return iter(self._all)

    def _meet(self, params: Iterable[Tensor]) -> None:
        self._all |= {param: None for param in params if not is_sharded(param)}

    def watch_all(self) -> None:
        """Watch whatever requires gradients by now: a frozen parameter refuses a hook."""
        for leaf in self:
            self.watch(leaf)

    def watch(self, leaf: Tensor, number: int | None = None) -> None:
        """`number`: of the perturbed parameter that this leaf was gathered from."""
        if leaf.requires_grad and leaf not in self._handles:
            number = self.numbers.get(leaf, number)  # type: ignore[call-overload]
            hook = partial(_arrive, ref(self._training), number, ref(leaf))
            self._handles[leaf] = leaf.register_hook(hook)
            self._all[leaf] = None

    def meet_optimizers(self) -> None:
        """Find what other optimizers train: what none of them holds needs no weighing.

        torch keeps no list of optimizers, so they are looked for, once, among all objects.
        """
        if self._met_optimizers:
            return
        self._met_optimizers = True
        for found in alive(Optimizer):  # the attached ones' perturbers weigh what they train
            attached = isinstance(vars(found).get(ASKS), ScalerAsks)
            if hasattr(found, "param_groups") and not attached:
                self._meet(_trained_by(found))

    def meet_graph(self, loss: Tensor) -> None:
        """Find the leaves of this graph that nobody named (a criterion's weights)."""
        self._meet(leaves_of([loss.grad_fn]))

    @property
    def gradients(self) -> list[Tensor]:
        """Those of this step: of our leaves (sharded ones' parts), and of others that it reached."""
        touched = self._training.step.touched
        known = [leaf for leaf in self if leaf in self.ours or leaf in touched]
        grads = [leaf.grad for leaf in known + self._sharded if leaf.grad is not None]
        return [getattr(grad, "_local_tensor", grad) for grad in grads]

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
        self._handles, self._all, self.ours = {}, {}, set()


def _arrive(
    training: ref[Training], number: int | None, leaf: ref[Tensor], grad: Tensor
) -> Tensor | None:
    """A leaf's hook. It must keep nothing alive: under DDP the cycle from a parameter through its
    hook back to the parameter runs through C++, where nothing collects it."""
    found, param = training(), leaf()
    return None if found is None or param is None else found.step.arrive(number, param, grad)


def leaves_of(graphs: list[Any]) -> Iterator[Tensor]:
    """The leaves that graphs come from."""
    seen, todo = set(), list(graphs)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        todo += [following for following, _ in node.next_functions]


def _trained_by(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _plain(*tensors: Tensor) -> bool:
    """Whether one operation can serve these among others: neither sparse nor sharded."""
    return all(type(t) is Tensor and t.layout is torch.strided for t in tensors)


def loss_in(value: Any) -> Any:
    """The loss in what `loss_of` returned: all of it, or first in a tuple, or "loss" in a mapping."""
    if isinstance(value, Mapping):
        return value.get("loss")
    return value[0] if isinstance(value, list | tuple) and value else value


def joined(values: Sequence[Any], factors: Sequence[float], clean: Sequence[bool]) -> Any:
    """The loss that the method minimises, and what stood beside it, without graphs: from the true
    weights where a pass runs at them, as lists where the batch was sliced."""
    pairs = zip((loss_in(value).detach() for value in values), factors, strict=True)
    total = reduce(torch.add, [loss if factor == 1 else loss * factor for loss, factor in pairs])
    kept = [value for value, true in zip(values, clean, strict=True) if true] or list(values)
    if isinstance(kept[0], Tensor):
        return total
    if isinstance(kept[0], Mapping):
        beside = {k: _together([value[k] for value in kept]) for k in kept[0] if k != "loss"}
        return {"loss": total, **beside}
    return (total, *(_together(parts) for parts in list(zip(*kept, strict=True))[1:]))


def _together(parts: Sequence[Any]) -> Any:
    parts = [pytree.tree_map_only(Tensor, Tensor.detach, part) for part in parts]
    return parts[0] if len(parts) == 1 else parts
