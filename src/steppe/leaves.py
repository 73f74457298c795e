"""Leaves: every parameter that gets gradients in a pass, perturbed or not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from steppe.distributed import alive, is_sharded
from steppe.standins import ASKS, ScalerAsks

if TYPE_CHECKING:
    from steppe.training import Training


class Leaves:
    """Every parameter that gets gradients, perturbed or not, whoever trains it: the model's, the
    optimizer's, and further ones as they are met.

    A hook on what accumulates each one's gradient tells the step of it before: gradients that
    `torch.autograd.grad` hands out pass it by. Sharded parameters see nothing of autograd: the
    gathered ones are watched in their place.
    """

    def __init__(self, training: Training) -> None:
        self._training, perturbed = training, [p.param for p in training.weights.params]
        self.numbers = {param: number for number, param in enumerate(perturbed)}
        """Which of the perturbed parameters each is."""
        self._sharded = [param for param in perturbed if is_sharded(param)]
        self._handles: dict[Tensor, tuple[Any, ...]] = {}
        """Of each leaf that is watched: its kind, the node that accumulates its gradient, the hook."""
        self._all: dict[Tensor, None] = {}
        self._steps: Any = None
        """The hook on the steps of all optimizers, once they were looked for."""
        self.late: dict[Tensor, int] = {}
        """Leaves with a gradient whose optimizer was found at its step alone, and the number of ours."""
        self._added_up = (0, 0)
        """How many passes a step has had, and how many nodes graphs had by then."""
        self._first = set(_trained_by(training.optimizer))
        self._count = len(self._first)
        self.ours: set[Tensor] = set()
        """Those of the model and its optimizer; the others may have gradients of another step."""
        self.meet_ours()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._all)

    def meet_ours(self) -> None:
        """Find what the model has and its optimizer trains by now: a head may have been replaced."""
        training = self._training
        gathered = self._all and training.weights.shards.several  # maybe, in place of sharded ones
        params = () if gathered else training.model.parameters()
        found = dict.fromkeys((*params, *_trained_by(training.optimizer)))
        if not found.keys() <= self.ours:
            self.meet(found)
            self.ours.update(found)

    def meet(self, params: Iterable[Tensor]) -> None:
        self._all |= {param: None for param in params if not is_sharded(param)}

    def watch_all(self) -> None:
        """Watch whatever requires gradients by now: a frozen parameter refuses a hook."""
        for leaf in self:
            self.watch(leaf)

    def watch(self, leaf: Tensor, number: int | None = None) -> None:
        """`number`: of the perturbed parameter that this leaf was gathered from."""
        kind, known = (leaf.device, leaf.dtype), self._handles.get(leaf)
        if not leaf.requires_grad or (known and known[0] == kind):
            return
        if known:
            known[-1].remove()  # converted since, which gives a leaf another node
        number = self.numbers.get(leaf, number)  # type: ignore[call-overload]
        node = get_gradient_edge(leaf).node  # a leaf holds it weakly: it is ours to keep
        hook = partial(_arrive, ref(self._training), number, ref(leaf))
        self._handles[leaf] = (kind, node, node.register_prehook(hook))
        self._all[leaf] = None

    def meet_optimizers(self) -> None:
        """Find what other optimizers train: what none of them holds needs no weighing.

        torch keeps no list of optimizers, so they are looked for, once, among all objects; later ones
        are met when they step.
        """
        if self._steps is None:
            for found in alive(Optimizer):
                if hasattr(found, "param_groups") and not _is_attached(found):
                    self.meet(_trained_by(found))
            hook = partial(_another_steps, ref(self._training))
            self._steps = register_optimizer_step_pre_hook(hook)
            finalize(self._training, self._steps.remove)

    def check_in_time(self, leaf: Tensor) -> None:
        """A gradient is about to be weighed: raise if that of the step before was of a pass, too."""
        if self.late.pop(leaf, -2) >= self._training.number - 1:
            raise self._too_late(leaf, "that step was made with")

    def added_up(self, passes: int) -> None:
        """A pass or the step is over: `.grad` is the sum of so many passes' gradients."""
        self._added_up = passes, _nodes()

    def meet_late(self, optimizer: Optimizer) -> None:
        """Another optimizer steps. What it trains was not weighed if it was not known: raise where that
        shows, at gradients that were added up as often as passes ran, with no forward since."""
        params = [p for p in _trained_by(optimizer) if p not in self._all and not is_sharded(p)]
        self.meet(params)
        new = {p: p.grad._version for p in params if p.grad is not None}
        passes, nodes = self._added_up
        if new and passes > 1 and nodes == _nodes() and min(new.values()) >= passes - 1:
            raise self._too_late(next(iter(new)), "its gradient looks like")
        self.late |= dict.fromkeys(new, self._training.number)

    def _too_late(self, leaf: Tensor, what: str) -> RuntimeError:
        name = self._training.method.name
        return RuntimeError(
            f"A parameter of shape {tuple(leaf.shape)} has an optimizer that was found after the first "
            f"pass of {name}(), when it stepped: {what} the sum of its passes' gradients, without their "
            "weights. Make all optimizers before the first pass, or call perturber.backward(), which "
            "weighs the loss."
        )

    def meet_graph(self, loss: Tensor) -> None:
        """Find the leaves of this graph that nobody named (a criterion's weights)."""
        self.meet(leaves_of([loss.grad_fn]))

    @property
    def gradients(self) -> list[Tensor]:
        """Those of this step: of our leaves (sharded ones' parts), and of others that it reached."""
        touched = self._training.step.touched
        known = [leaf for leaf in self if leaf in self.ours or leaf in touched]
        grads = [leaf.grad for leaf in known + self._sharded if leaf.grad is not None]
        return [getattr(grad, "_local_tensor", grad) for grad in grads]

    def marks(self) -> list[tuple[int, int]]:
        """What changes when somebody writes, replaces or drops a gradient."""
        return [(id(grad), grad._version) for grad in self.gradients]

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
        for *_, handle in self._handles.values():
            handle.remove()
        if self._steps is not None:
            self._steps.remove()
        self._handles, self._all, self.ours, self.late = {}, {}, set(), {}


def _arrive(
    training: ref[Training], number: int | None, leaf: ref[Tensor], grads: tuple[Tensor | None]
) -> tuple[Tensor] | None:
    """A leaf's hook. It must keep nothing alive: under DDP the cycle from a parameter through its
    hook back to the parameter runs through C++, where nothing collects it."""
    found, param, (grad,) = training(), leaf(), grads
    if found is None or param is None or grad is None:
        return None
    weighed = found.step.arrive(number, param, grad)
    return None if weighed is None else (weighed,)


@_disable_dynamo
def _another_steps(training: ref[Training], optimizer: Optimizer, *_: Any) -> None:
    """A hook on every optimizer's step: if it came after the first pass, what it trains was not weighed
    so far. It must keep nothing alive: torch's list of hooks is global."""
    if (found := training()) is not None and not _is_attached(optimizer):
        found.leaves.meet_late(optimizer)


def _nodes() -> int:
    """Of all graphs of this thread so far: it grows with every forward that a backward can follow."""
    return torch._C._autograd._get_sequence_nr()


def _is_attached(optimizer: Optimizer) -> bool:
    """Whether a perturber weighs what it trains."""
    return isinstance(vars(optimizer).get(ASKS), ScalerAsks)


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
