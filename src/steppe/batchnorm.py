"""Statistics of normalisation layers: whose passes they come from, and how to take them anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from steppe.distributed import Ranks
from steppe.methods import Method


class Held:
    """Attributes of modules that have other values for a while, until `let_go()`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, module: nn.Module, name: str, value: object) -> None:
        self.at_end(partial(setattr, module, name, getattr(module, name)))
        setattr(module, name, value)

    def at_end(self, undo: Callable[[], object]) -> None:
        """What else is done when it ends."""
        self._undo.append(undo)

    def let_go(self) -> None:
        """Put back what was there before. Safe to repeat, also if Ctrl-C came in between."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


def freeze_statistics(model: nn.Module, held: Held) -> None:
    """Running statistics stay as they are while a pass normalises with its batch's own.

    `track_running_stats = False` until the end of backward, so that activation checkpointing
    recomputes the same thing. (`momentum = 0` would turn one infinite batch into NaN statistics
    and still count it.) InstanceNorm updates its buffers whatever the flag says: they are put away.
    """
    for module in (m for m in tracked_norms(model) if m.training):
        if isinstance(module, _InstanceNorm):
            held.set(module, "running_mean", None)
            held.set(module, "running_var", None)
        else:
            held.set(module, "track_running_stats", False)


def copy_buffers(model: nn.Module, held: Held) -> None:
    """Whatever a forward writes into buffers goes to copies of them."""
    copies = {buffer: buffer.clone() for buffer in model.buffers()}  # one may have several places
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                held.set(module, name, copies[buffer])


def follow_statistics(model: nn.Module, held: Held, fresh: list[bool], seen: int) -> None:
    """Running statistics follow one step in several, of which `seen` were before: fresh ones at first
    by their plain mean, so that they fit from the first such step on. `fresh`: which ones held nothing
    when training began; the first call looks."""
    norms = tracked_norms(model)
    if not fresh:
        means = [m.running_mean for m in norms]
        fresh += [b is None or b.is_meta or not bool(b.any()) for b in means]
    share = 1 / (seen + 1)
    early = [
        m for m, new in zip(norms, fresh, strict=False) if new and 0 < (m.momentum or 0) < share
    ]
    if early and any(m._compiled_call_impl or hasattr(m, "_orig_mod") for m in model.modules()):
        # a compiler makes a variant for each momentum: it sees 1 alone, and the rest is done afterwards
        now = [b for m in early for b in (m.running_mean, m.running_var) if b is not None]
        held.at_end(partial(torch._foreach_lerp_, now, [b.clone() for b in now], 1 - share))
        share = 1.0
    for module in early:
        held.set(module, "momentum", share)


class SharedStatistics:
    """BatchNorm's buffers of the clean ranks, on their way to the perturbed ones."""

    def __init__(self, model: nn.Module, method: Method, ranks: Ranks) -> None:
        self._ranks, self._groups = ranks, Held()
        self.buffers: list[Tensor] = []
        self._clean_ranks = 0
        if ranks.index is None or not method.has_clean_pass:
            return
        self.buffers = [b for m in tracked_norms(model) for b in m.buffers(recurse=False)]
        self._mine = method.passes[ranks.index].perturbation is None
        self._clean_ranks = ranks.columns * sum(p.perturbation is None for p in method.passes)

    def pack(self, like: Tensor) -> Tensor:
        if not self.buffers:
            return like.new_zeros(0)
        flat = torch.cat([b.detach().flatten().to(like) for b in self.buffers])
        return flat / self._clean_ranks if self._mine else torch.zeros_like(flat)

    def unpack(self, message: Tensor) -> None:
        """Perturbed ranks take the mean of the clean ones; those keep their own."""
        if not self.buffers or self._mine:
            return
        parts = message.split([b.numel() for b in self.buffers])
        for buffer, part in zip(self.buffers, parts, strict=True):
            value = part.view(buffer.shape)
            buffer.copy_(value if buffer.is_floating_point() else value.round())

    def narrow(self, model: nn.Module) -> None:
        """Let SyncBatchNorm share statistics among the ranks of one pass only."""
        ranks = self._ranks
        layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        if not layers or ranks.index is None or ranks.ddp is None:
            return
        mine = range(ranks.index * ranks.columns, (ranks.index + 1) * ranks.columns)
        members = [dist.get_global_rank(ranks.groups[0], r) for r in mine]
        group = dist.new_group(members, use_local_synchronization=True)
        for layer in layers:
            self._groups.set(layer, "process_group", group)

    def let_go(self) -> None:
        """Give SyncBatchNorm its groups back and forget the model."""
        self._groups.let_go()
        self.buffers = []


def tracked_norms(model: nn.Module) -> list[_NormBase]:
    """The normalisation layers that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]


@torch.no_grad()
def recompute_norm_stats(
    model: nn.Module, batches: Iterable[Any], *, call: Callable[[Any], Any] | None = None
) -> None:
    """Take the running statistics of all normalisation layers anew, at the true weights.

    RWP and ARWP train at perturbed weights and leave statistics from there; one pass over training
    batches after training replaces them. `batches` gives inputs, tuples whose first item is the
    input, or dictionaries of keyword arguments; `call` says how to run the model on anything else.
    Batches count by their size. Layers other than normalisation run in evaluation mode (no dropout).

    Examples:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> recompute_norm_stats(net, [(torch.randn(32, 4), None)])
    """
    layers = tracked_norms(model)
    if not layers:
        return
    held, seen = Held(), 0
    for module in model.modules():
        held.set(module, "training", module in layers)
    try:
        for batch in batches:
            if (size := batch_size(batch)) == 0:
                continue
            seen += size
            for layer in layers:
                if seen == size:
                    layer.reset_running_stats()
                held.set(layer, "momentum", size / seen)
            call(batch) if call else _run(model, batch)
    finally:
        held.let_go()
    if not seen:
        raise ValueError("recompute_norm_stats() got no batches; the statistics are as they were.")


def _run(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, dict):
        model(**batch)
    else:
        model(batch[0] if isinstance(batch, list | tuple) else batch)


def batch_size(batch: Any) -> int:
    """How many samples a batch holds: the length of its first tensor."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise TypeError(
        f"A batch must hold a tensor with a batch dimension, got {type(batch).__name__}."
    )
