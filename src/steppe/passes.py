"""Passes: what one does while it is under way, the batches that several get, and what comes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from steppe.batchnorm import Held

if TYPE_CHECKING:
    from steppe.methods import Method
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
        self.scouts = held and training.method.scouts(index)
        self.share = factor if weighs_loss and factor and not self.scouts else 1.0
        """What its gradients are multiplied by already, through the loss."""
        self.factor = 1.0 if self.scouts else factor / self.share
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
        self._before: list[tuple[int, int]] = []
        """How gradients stood when it was entered."""
        self._changed = ""  # what somebody did to them before its backward
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
        climbs = self.noise is not None and self.noise.needs_gradient
        if climbs and training.weights.active and not training.step.gradient:
            raise RuntimeError(f"{self} needs the gradient of the pass before it; run that first.")
        ours = self._weighs_loss and self.factor == 1 and training.several
        self.apart = ours and self._adds_up()
        with ExitStack() as exits:
            exits.callback(setattr, training, "holding", None)
            if self.scouts:
                training.leaves.meet_optimizers()
                self._aside = training.leaves.set_aside()
                exits.callback(self._aside.clear)
                exits.callback(training.leaves.give_back, self._aside, self._of_pass)
                exits.enter_context(training.ranks.scouting())
            exits.callback(training.restore)
            training.begin(self)
            training.holding, self._entered = self, True
            training.step.by_hooks = self._by_hooks
            self._before = training.leaves.marks() if training.several else []
            self._exits = exits.pop_all()
        return self

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss of this pass, scaled as scaler and weights ask."""
        training, leaves = self._training, self._training.leaves
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss_of must return the loss, a tensor with one value; got {got}.")
        arrived = self.in_backward  # before this one
        training.step.backward_begins(self)
        if training.several and (arrived or (self.apart and self._changed == "written")):
            raise RuntimeError(
                f"loss_of ran a backward of its own in {self}, whose weight is multiplied into the loss that "
                f"it returns. Return the whole loss, or hold the passes open: {training.loop.hold}."
            )
        if training.number < EARLY and (self.scouts or self.factor != 1):
            leaves.meet_graph(loss)
            if not self.apart:
                leaves.watch_all()
            if self.scouts:
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

    def watch_pull(self, output: Any, sees_outputs: bool) -> None:
        """Measure how hard the loss pulls on the model's outputs: for a mean cross-entropy twice the mean
        of 1 - p. `sees_outputs`: single numbers alone are no loss, but the outputs of one sample."""
        logits = output.get("logits") if isinstance(output, Mapping) else None
        tensors = differentiable(output if logits is None else logits)  # a loss may be beside them
        outputs = [t for t in tensors if t.numel() > 1]
        if not outputs and sees_outputs:
            outputs = [t for t in tensors if t.dim()] or tensors
        self.losses = [t for t in differentiable(output) if t.numel() == 1]
        bases = [t if t._base is None or t._base.grad_fn is None else t._base for t in outputs]
        for tensor in {id(t): t for t in bases}.values():
            tensor.register_hook(self._pulled)

    def _pulled(self, gradient: Tensor) -> None:
        wide = gradient.dtype if gradient.dtype.itemsize >= 4 else torch.float32
        pull = gradient.detach().abs().sum(dtype=wide)
        self.pull = pull if self.pull is None else self.pull + pull

    def check_kept(self) -> None:
        """Its backward begins: raise if gradients of passes before went since it was entered."""
        training, leaves = self._training, self._training.leaves
        if not training.several or (marks := leaves.marks()) == self._before:
            return
        gone = len(marks) < len(self._before) or not any(bool(g.any()) for g in leaves.gradients)
        self._changed = "dropped" if gone else "written"
        passes, scouts = training.method.passes, training.method.scouts
        if gone and any(passes[i].weight and not scouts(i) for i in training.step.done):
            raise RuntimeError(
                f"Gradients of the passes before were thrown away inside of {self}. Call zero_grad() before "
                "the first pass, or after optimizer.step()."
            )

    def _adds_up(self) -> bool:
        """Whether gradients of passes are put aside for each other and added up by us."""
        return not (self._training.ranks.averages or self._training.leaves.hooked)

    def check_reached(self) -> None:
        """After a backward that began at weights: refuse what was weighed with this pass by mistake."""
        training = self._training
        if not (self.reached or self.end_is_queued):
            training.restore()
            raise RuntimeError(
                "Another loss was differentiated between the attached model's forward and its backward: "
                f"its gradients were weighed with this pass of {training.method.name}(). "
                "Differentiate it before the attached model's forward, or after its backward."
            )

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
        if self.scouts:
            training.step.gradient = [slot.param.grad for slot in training.weights.active]


def put_back(run: Run) -> str:
    """What is said of a pass whose weights somebody put back."""
    return (
        f"The weights were put back in the middle of {run}, by an evaluation or state_dict(). Do that "
        "outside of the pass, or call perturber.restore() if Ctrl-C came in between."
    )


def differentiable(value: Any) -> list[Tensor]:
    """All tensors in a value that a graph stands behind or that require gradients."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]


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


def deal(
    method: Method, batches: Sequence[Any], only: int | None = None
) -> list[tuple[int, Sequence[Any], float]]:
    """The number of each pass to run (or of the `only` one that this rank runs), the arguments of its
    loss, and the factor of its gradient."""
    name, passes = method.name, method.passes
    if only is not None:
        if len(batches) > 1:
            raise ValueError(
                f"{name}() runs its passes on different ranks, and every rank brings one batch of its "
                f"own; got {len(batches)}. Call perturber.backward(loss_of, batch)."
            )
        return [(only, _arguments(*batches), passes[only].weight * len(passes))]
    if method.feed == "each":
        if len(batches) != len(passes):
            names = ", ".join(f"batch{i + 1}" for i in range(len(passes)))
            raise ValueError(
                f"{name}() takes a batch for each of its {len(passes)} passes, got "
                f"{len(batches)}. Call perturber.backward(loss_of, {names})."
            )
        return [(i, _arguments(batches[i]), p.weight) for i, p in enumerate(passes)]
    sliced = method.m is not None or method.feed == "slices"
    if len(batches) > 1 or (sliced and not batches):
        raise ValueError(
            f"{name}() takes one batch, got {len(batches)}. Call perturber.backward(loss_of, batch)."
        )
    batch = _arguments(*batches)
    if method.feed == "slices":
        return [(i, *part) for i, part in enumerate(slices(batch, len(passes)))]
    parts = [(batch, 1.0)] if method.m is None else slices(batch, of=method.m)
    return [(i, part, p.weight * share) for part, share in parts for i, p in enumerate(passes)]


def slices(
    batch: Sequence[Any], parts: int | None = None, *, of: int = 1
) -> list[tuple[Sequence[Any], float]]:
    """The batch in so many equal `parts`, or parts `of` so many samples, each with its share of them.

    Examples:
        >>> [(part[0].tolist(), share) for part, share in slices([torch.arange(5)], of=4)]
        [([0, 1, 2, 3], 0.8), ([4], 0.2)]
    """
    leaves = [leaf for leaf in pytree.tree_leaves(list(batch)) if isinstance(leaf, Tensor)]
    sizes = sorted({leaf.shape[0] for leaf in leaves if leaf.dim()})
    if len(sizes) != 1:
        raise ValueError(
            f"A batch that is sliced must hold tensors of one size along dimension 0, got sizes {sizes}."
        )
    (size,) = sizes
    if parts is not None and parts > size:
        raise ValueError(f"A batch of {size} cannot be cut into {parts} slices.")
    steps = range(0, size, of) if parts is None else (i * size // parts for i in range(parts))

    def rows(start: int, stop: int, leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    bounds = pairwise([*steps, size])
    return [(pytree.tree_map(partial(rows, a, b), list(batch)), (b - a) / size) for a, b in bounds]


def _arguments(batch: Any = ()) -> Sequence[Any]:
    return batch if isinstance(batch, list | tuple) else (batch,)
