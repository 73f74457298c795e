"""The weights: a backup, and the only code that writes parameter values.

Moves are made in place under `no_grad`, so autograd's version counters still catch a stale graph.
A full backup is taken before anything is written: putting back is a copy, bit-exact and safe to
repeat, and the noise itself never exists as a whole (one extra copy of the weights in all).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from steppe.noise import CPU_BLOCK, DEVICE_BLOCK, PARALLEL_FROM, Draw, spread
from steppe.shards import Shards
from steppe.slots import Block, Rows, Slot, filter_norms, local


class Weights:
    """Every perturbed parameter, its filters in one row of numbers, and the way back.

    Quantities per filter (norms, history, std) are vectors over the filters of all parameters, a few
    thousand numbers, the same on every rank that holds a shard.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter, dict[str, Any]]],
        shards: Shards | None = None,
        compile_noise: bool = False,
    ) -> None:
        self.shards = shards or Shards()
        self.compiles = compile_noise
        self.slots: list[Slot] = []
        filters = blocks = 0
        for name, param, group in named:
            count = param.shape[0] if param.dim() > 1 else 1
            row = param.numel() // count if param.dim() > 1 else 1
            rows = max(1, (CPU_BLOCK if param.device.type == "cpu" else DEVICE_BLOCK) // row)
            place = slice(filters, filters + count)
            offset = self.shards.offset(param)
            self.slots.append(Slot(name, param, group, place, rows, blocks, offset))
            filters += count
            blocks += -(-(param.shape[0] if param.dim() else 1) // rows)
        self.filters, self.blocks = filters, blocks
        dtypes = {slot.param.dtype for slot in self.slots}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.device = self.slots[0].param.device if self.slots else torch.device("cpu")
        self.sizes = self._repeat([s.param.numel() // s.filter_count for s in self.slots])
        self._known_norms = torch.full_like(self.sizes, torch.nan)
        self._backup: dict[Slot, Tensor] = {}
        self.moved: list[Slot] = []
        """The parameters that are away from their true values, in the order of `slots`."""
        if self.shards.several:
            self.filter_norms()

    # ------------------------------------------------------------------ what there is

    @property
    def active(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.active]

    def filter_norms(self, tensors: Sequence[Tensor | None] | None = None) -> Tensor:
        """‖·‖ of each filter of the weights (or of tensors shaped like them; None counts as 0)."""
        if tensors is None:
            if self.shards.several:
                return self._sharded_norms()
            tensors = [slot.param.detach() if slot.active else None for slot in self.slots]
        norms = [None if t is None else filter_norms(local(t), self.dtype) for t in tensors]
        if not self.shards.several:
            return self.per_filter(norms)
        squares = torch.zeros(self.filters, dtype=self.dtype, device=self.device)
        for slot, norm in zip(self.slots, norms, strict=True):
            if norm is not None and self.shards.counts(slot.param):
                squares[slot.my_filters] += norm.to(self.device).square()
        return self.shards.sum_(squares).sqrt_()

    def _sharded_norms(self) -> Tensor:
        """Norms of sharded weights; those of the last pass if somebody only looks."""
        if not self.shards.silent:
            weights = [slot.param.detach() if slot.active else None for slot in self.slots]
            self._known_norms = self.filter_norms(weights)
        return self._known_norms

    def per_filter(self, parts: Sequence[Tensor | None]) -> Tensor:
        """One vector over all filters from each parameter's part of it (None counts as 0)."""
        rows = [
            torch.zeros(slot.filter_count, dtype=self.dtype, device=self.device)
            if part is None
            else part.to(self.device, self.dtype, non_blocking=True)
            for slot, part in zip(self.slots, parts, strict=True)
        ]
        return torch.cat(rows) if rows else torch.zeros(0, dtype=self.dtype)

    def total_norm(self, tensors: Sequence[Tensor | None], slots: Sequence[Slot]) -> Tensor:
        """‖·‖ over all of the given tensors together, one (or None) for each of these slots."""
        mine = [
            t.to_dense() if t.is_sparse else local(t)
            for t, slot in zip(tensors, slots, strict=True)
            if t is not None and self.shards.counts(slot.param)
        ]
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        if mine:
            norms = torch._foreach_norm(mine, 2, dtype=self.dtype)
            total = torch.linalg.vector_norm(torch.stack([n.to(self.device) for n in norms]))
        return self.shards.sum_(total.square()).sqrt_() if self.shards.several else total

    def zeros(self) -> list[Tensor]:
        """Memory shaped (and sharded) like the parameters, in at least 32 bits."""
        return [
            torch.zeros_like(s.param, dtype=torch.promote_types(s.param.dtype, torch.float32))
            for s in self.slots
        ]

    def strengths(self) -> Tensor:
        """Each filter's factor on the strength, from the parameter groups; 0 where frozen."""
        return self._repeat([slot.strength if slot.active else 0.0 for slot in self.slots])

    def _repeat(self, per_slot: Sequence[float]) -> Tensor:
        """One value per parameter, repeated for each of its filters."""
        counts = torch.tensor([slot.filter_count for slot in self.slots], dtype=torch.long)
        values = torch.tensor(per_slot, dtype=self.dtype)
        return values.repeat_interleave(counts).to(self.device)

    # ------------------------------------------------------------------ moves

    def save(self) -> None:
        """Back up the true weights. From here until `restore()` they may be written."""
        if self.moved:
            raise RuntimeError("The weights are already perturbed; restore() them first.")
        active = self.active
        for slot in active:
            if not _fits(self._backup.get(slot), slot.values):
                self._backup[slot] = torch.empty_like(slot.values)
        with torch.no_grad():
            _foreach_copy([self._backup[s] for s in active], [s.values for s in active])
        self.moved = active

    def restore(self) -> None:
        """Put the true weights back, bit for bit. Harmless when nothing was moved."""
        if not self.moved:
            return
        with torch.no_grad():
            moved = self.moved
            _foreach_copy([s.values for s in moved], [self._backup[s] for s in moved])
        self.moved = []
        self.shards.reshard()

    def release_model(self) -> None:
        """Give up the backup's memory and the modules that hold the shards."""
        self._backup.clear()
        self.shards.release_model()

    def add_noise(
        self,
        draw: Draw,
        std: Tensor,
        factor: Callable[[Tensor], Tensor] | None = None,
        of: Sequence[Tensor] = (),
    ) -> None:
        """Add Gaussian noise with this std per filter.

        If given, `factor(part)` multiplies it element by element, for parts of the tensors `of`, one
        like each of `slots`.
        """
        if self.compiles and factor is None:
            from steppe.hashed import add_noise  # here, for torch.compile is slow to import

            add_noise(self.moved, std, draw)
            return
        seed_of = draw.block_seeds(self.blocks)
        extra = dict(zip(self.slots, of, strict=True)) if factor else {}
        rows = {
            slot: Rows(slot, std, draw.sign, local(extra[slot]) if factor else None)
            for slot in self.moved
        }

        def add(block: Block) -> None:
            there = rows[block.slot]
            eps = there.standard_normal(block, seed_of(block.number)).mul_(block.of(there.std))
            if factor is not None and there.extra is not None:
                eps.mul_(factor(block.of(there.extra)))
            block.of(there.values).add_(eps)

        blocks = (block for slot in self.moved for block in slot.blocks)
        spread(add, blocks, self._threads())
        self.shards.reshard()

    def add(self, directions: Sequence[Tensor | None], scale: Tensor) -> None:
        """Add `scale * direction` to each moved parameter; `scale` stays on the device."""

        @cache
        def size(device: torch.device, dtype: torch.dtype, strength: float) -> Tensor:
            return scale.to(device, dtype) * strength

        with torch.no_grad():
            for slot, direction in zip(self.moved, directions, strict=True):
                if direction is not None:
                    values = slot.values
                    its = size(values.device, values.dtype, slot.strength)
                    values.addcmul_(local(direction), its)
        self.shards.reshard()

    def decay_and_add(
        self,
        memory: Sequence[Tensor],
        values: Sequence[Tensor | None],
        decay: float,
        scale: Tensor | float,
        *,
        square: bool = False,
    ) -> None:
        """memory <- decay memory + scale value (or value²), piece by piece, for each slot.

        If any value is not finite, the whole step is dropped, without asking the device.
        """
        finite = self.total_norm(values, self.slots).isfinite()
        for slot, kept, value in zip(self.slots, memory, values, strict=True):
            ok = finite.to(kept.device)
            for block in slot.blocks:
                part = block.of(local(kept))
                new = part * decay
                if value is not None:
                    dense = value.to_dense() if value.is_sparse else local(value)
                    add = block.of(dense).to(part.dtype)
                    new += (add.square() if square else add) * torch.as_tensor(scale).to(part)
                part.copy_(torch.where(ok, new, part))

    def _threads(self) -> int:
        if self.device.type != "cpu" or sum(s.param.numel() for s in self.moved) < PARALLEL_FROM:
            return 1
        return torch.get_num_threads()


def _foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _fits(backup: Tensor | None, values: Tensor) -> bool:
    return (
        backup is not None
        and backup.shape == values.shape
        and backup.dtype == values.dtype
        and backup.device == values.device
        and backup.stride() == values.stride()
    )
