"""A private copy of a model, whose weights may be moved and whose loss can be taken."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from steppe.batchnorm import recompute_norm_stats

if TYPE_CHECKING:
    from steppe.analysis.problem import Problem


class Replica:
    """The model of a `Problem`, copied, with its weights at `centre` until they are moved.

    `rows` of the methods below is a `slice` of the samples, all by default.
    """

    def __init__(self, problem: Problem) -> None:
        _keep_pages()
        self.problem = problem
        self.model = _copy(problem.model)
        self.device = next(self.model.parameters()).device
        self.dtype = next(self.model.parameters()).dtype
        self.model.to(memory_format=problem.layout)  # type: ignore[call-overload]
        self.norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm)]
        self.model.eval()
        for norm in self.norms if problem.bn == "batch" else ():
            # Without stored statistics BatchNorm uses the batch's, and has no buffer to update.
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        named = dict(self.model.named_parameters())
        for name, p in named.items():
            p.grad = None
            p.requires_grad_(name in problem.names)
        self.params: list[Tensor] = [named[name] for name in problem.names]
        self.centre = [p.detach().clone() for p in self.params]
        self._stale = problem.bn == "recalibrate"
        self._batches: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    def as_input(self, x: Tensor) -> Tensor:
        layout = self.problem.layout if x.ndim == 4 else torch.preserve_format
        return x.to(self.device, memory_format=layout)

    @torch.no_grad()
    def place(self, weights: Sequence[Tensor]) -> None:
        """Move the copy to these weights."""
        for p, w in zip(self.params, weights, strict=True):
            p.copy_(w)
        self._stale = self.problem.bn == "recalibrate"

    def offset(self, eps: Sequence[Tensor], scale: float = 1.0) -> None:
        """Move the copy to `centre + scale * eps`; never incrementally, so no error builds up."""
        self.place([w.add(e, alpha=scale) for w, e in zip(self.centre, eps, strict=True)])

    def batches(self, rows: slice = slice(None)) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches of nearly equal size: a last one of a single sample would break BatchNorm."""
        start, stop, _ = rows.indices(self.problem.samples)
        key = (start, stop)
        if key not in self._batches:
            x, y = (tensor[start:stop] for tensor in self.problem.data)
            parts = -(-len(x) // self.problem.microbatch)
            pairs = zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)
            # Laid out once, not at each of thousands of evaluations; on a GPU when it is needed.
            here = x.device == self.device
            self._batches = {key: [(self.as_input(x) if here else x, y) for x, y in pairs]}
        for index, (x, y) in enumerate(self._batches[key]):
            # A model that draws random numbers is the same function each time it is asked.
            # (torch.manual_seed also queues a call for every absent GPU: half a millisecond.)
            torch.default_generator.manual_seed(index)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(index)
            yield self.as_input(x), y.to(self.device)

    def evaluate(
        self,
        rows: slice = slice(None),
        *,
        alter: Callable[[Tensor, int], Tensor] | None = None,
        look: Callable[[Any, Tensor], object] | None = None,
    ) -> tuple[float, float | None]:
        """Loss and, where the targets are classes, accuracy at the present weights.

        `alter(x, first)` changes the inputs of a micro-batch that begins with sample `first`;
        `look(output, y)` sees what the model makes of it: the logits, where it gives them by name.
        """
        self.refresh_statistics()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        hits = torch.zeros(2, dtype=torch.float64, device=self.device)
        count, classes = 0, False
        with torch.no_grad():
            for x, y in self.batches(rows):
                output = self.model(x if alter is None else alter(x, count))
                named = isinstance(output, Mapping)
                logits = (
                    output.get("logits", output) if named else getattr(output, "logits", output)
                )
                if look is not None:
                    look(logits, y)
                total += self.problem.loss(output, y).double() * len(x)
                count += len(x)
                right = _hits(logits, y)
                if right is not None:
                    hits, classes = hits + right, True
        return total.item() / count, (hits[0] / hits[1]).item() if classes else None

    def gradient(self, rows: slice = slice(None)) -> tuple[float, list[Tensor]]:
        """Loss and its gradient, one tensor for each parameter."""
        self.refresh_statistics()
        total, count = 0.0, 0
        sums = [torch.zeros_like(p) for p in self.params]
        for x, y in self.batches(rows):
            loss = self.problem.loss(self.model(x), y)
            grads = torch.autograd.grad(loss, self.params, materialize_grads=True)
            for s, g in zip(sums, grads, strict=True):
                s.add_(g, alpha=len(x))
            total += loss.item() * len(x)
            count += len(x)
        return total / count, [s.div_(count) for s in sums]

    def refresh_statistics(self) -> None:
        """Recompute BatchNorm's statistics over all samples, if the weights moved since."""
        if self._stale:
            recompute_norm_stats(self.model, self.batches())
            self._stale = False


@functools.cache
def _keep_pages() -> None:
    """Let the C library keep freed activations instead of giving them back to the system.

    glibc stops unmapping blocks up to the largest mapped one that it has seen freed, at most 32 MiB:
    else every activation would be new memory, zeroed page by page.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and the "
            "analyses never work on your own model. Load the weights into a fresh instance of it."
        ) from error


def _hits(output: Any, y: Tensor) -> Tensor | None:
    """How many targets the largest output names rightly, and how many there are, without negative
    ones (torch's `ignore_index`).

    Where an output is not a number, nothing is named. A single output names no class.
    """
    if not isinstance(output, Tensor) or output.ndim < 2 or y.is_floating_point():
        return None
    largest, guess = output.max(1)
    if guess.shape != y.shape or output.shape[1] < 2:
        return None
    counts = y >= 0
    right = (guess == y) & ~largest.isnan() & counts
    return torch.stack([right.sum(), counts.sum()]).double()
