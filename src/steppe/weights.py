"""The weights: their filters, a backup, and the only code that writes parameter values.

Moves are made in place under `no_grad`, so autograd's version counters still catch a stale graph.
A full backup is taken before anything is written: putting back is a copy, bit-exact and safe to
repeat, and the noise itself never exists as a whole (one extra copy of the weights in all).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steppe.noise import CPU_BLOCK, DEVICE_BLOCK, PARALLEL_FROM, Draw, in_order, standard_normal_


@dataclass(frozen=True, eq=False)
class Slot:
    """One perturbed parameter and its place among all filters and noise blocks."""

    name: str
    param: nn.Parameter
    group: dict[str, Any]
    filters: slice
    rows_per_block: int
    first_block: int

    @property
    def active(self) -> bool:
        """Frozen parameters are never touched, whenever they were frozen."""
        return self.param.requires_grad

    @property
    def strength(self) -> float:
        """The parameter group's own factor on the strength (`strength=` in the group)."""
        return float(self.group.get("strength", 1.0))

    def expand(self, per_filter: Tensor) -> Tensor:
        """This parameter's part of a vector over all filters, shaped to broadcast over it."""
        mine = per_filter[self.filters].to(self.param.device)
        return mine.view(-1, *[1] * (self.param.dim() - 1)) if self.param.dim() > 1 else mine[0]

    def blocks(self) -> Iterator[Block]:
        rows = self.param.shape[0] if self.param.dim() else 1
        for number, start in enumerate(range(0, rows, self.rows_per_block)):
            yield Block(
                self, start, min(start + self.rows_per_block, rows), self.first_block + number
            )


@dataclass(frozen=True, eq=False)
class Block:
    """Whole filters of one parameter (or a stretch of a vector) that are drawn together."""

    slot: Slot
    start: int
    stop: int
    number: int

    def of(self, tensor: Tensor) -> Tensor:
        """This block's part of a tensor shaped like the parameter, or that broadcasts over it."""
        return tensor[self.start : self.stop] if tensor.dim() else tensor


class Weights:
    """Every perturbed parameter, its filters in one row of numbers, and the way back.

    A filter is a slice along dimension 0 of a parameter with two or more dimensions; a vector or
    scalar parameter is one filter (SPEC of the paper's *filter-wise* noise). Quantities per filter
    (norms, history, std) are vectors over the filters of all parameters, a few thousand numbers.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter, dict[str, Any]]]) -> None:
        self.slots: list[Slot] = []
        filters = blocks = 0
        for name, param, group in named:
            count = param.shape[0] if param.dim() > 1 else 1
            row = param[0].numel() if param.dim() > 1 else 1
            per_block = CPU_BLOCK if param.device.type == "cpu" else DEVICE_BLOCK
            rows = max(1, per_block // row)
            place = slice(filters, filters + count)
            self.slots.append(Slot(name, param, group, place, rows, blocks))
            filters += count
            blocks += -(-(param.shape[0] if param.dim() else 1) // rows)
        self.filters = filters
        self.blocks = blocks
        dtypes = {slot.param.dtype for slot in self.slots}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.device = self.slots[0].param.device if self.slots else torch.device("cpu")
        sizes = [slot.param.numel() // _count(slot.filters) for slot in self.slots]
        counts = torch.tensor([_count(slot.filters) for slot in self.slots])
        self.sizes = torch.tensor(sizes, dtype=self.dtype).repeat_interleave(counts).to(self.device)
        self._backup: dict[Slot, Tensor] = {}
        self.moved: list[Slot] = []
        """The parameters that are away from their true values, in the order of `slots`."""

    # ------------------------------------------------------------------ what there is

    @property
    def active(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.active]

    def filter_norms(self, tensors: Sequence[Tensor | None] | None = None) -> Tensor:
        """‖·‖ of each filter of the weights (or of tensors shaped like them; None counts as 0)."""
        if tensors is None:
            tensors = [slot.param.detach() if slot.active else None for slot in self.slots]
        return self.per_filter(
            [None if t is None else filter_norms(t, self.dtype) for t in tensors]
        )

    def per_filter(self, parts: Sequence[Tensor | None]) -> Tensor:
        """One vector over all filters from each parameter's part of it (None counts as 0)."""
        rows = [
            torch.zeros(_count(slot.filters), dtype=self.dtype, device=self.device)
            if part is None
            else part.to(self.device, self.dtype, non_blocking=True)
            for slot, part in zip(self.slots, parts, strict=True)
        ]
        return torch.cat(rows) if rows else torch.zeros(0, dtype=self.dtype)

    def total_norm(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """‖·‖ over all of the given tensors together."""
        there = [t.to_dense() if t.is_sparse else t for t in tensors if t is not None]
        if not there:
            return torch.zeros((), dtype=self.dtype, device=self.device)
        norms = torch._foreach_norm(there, 2, dtype=self.dtype)
        total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(self.device) for n in norms]))
        return total

    def zeros(self) -> list[Tensor]:
        """Memory shaped like the parameters, in at least 32 bits."""
        return [
            torch.zeros_like(s.param, dtype=torch.promote_types(s.param.dtype, torch.float32))
            for s in self.slots
        ]

    def strengths(self) -> Tensor:
        """Each filter's factor on the strength, from the parameter groups; 0 where frozen."""
        values = [slot.strength if slot.active else 0.0 for slot in self.slots]
        counts = torch.tensor([_count(slot.filters) for slot in self.slots])
        return torch.tensor(values, dtype=self.dtype).repeat_interleave(counts).to(self.device)

    # ------------------------------------------------------------------ moves

    def save(self) -> None:
        """Back up the true weights. From here until `restore()` they may be written."""
        if self.moved:
            raise RuntimeError("The weights are already perturbed; restore() them first.")
        active = self.active
        for slot in active:
            if not _fits(self._backup.get(slot), slot.param):
                self._backup[slot] = torch.empty_like(slot.param, requires_grad=False)
        with torch.no_grad():
            _foreach_copy([self._backup[s] for s in active], [s.param for s in active])
        self.moved = active

    def restore(self) -> None:
        """Put the true weights back, bit for bit. Harmless when nothing was moved."""
        if not self.moved:
            return
        with torch.no_grad():
            moved = self.moved
            _foreach_copy([s.param for s in moved], [self._backup[s] for s in moved])
        self.moved = []

    def add_noise(
        self,
        draw: Draw,
        std: Tensor,
        factor: Callable[[Slot, Block], Tensor] | None = None,
    ) -> None:
        """Add Gaussian noise with this std per filter (and, if given, a factor per element)."""
        seed_of = draw.block_seeds(self.blocks)
        stds = {slot: slot.expand(std) * (draw.sign * slot.strength) for slot in self.moved}

        def noise(block: Block) -> Tensor:
            with torch.no_grad():
                eps = _standard_normal(block, seed_of(block.number))
                eps.mul_(block.of(stds[block.slot]))
                return eps if factor is None else eps.mul_(factor(block.slot, block))

        blocks = [block for slot in self.moved for block in slot.blocks()]
        for block, eps in zip(blocks, in_order(noise, blocks, self._threads()), strict=True):
            with torch.no_grad():
                block.of(block.slot.param).add_(eps)

    def add(self, directions: Sequence[Tensor | None], scale: Tensor) -> None:
        """Add `scale * direction` to each moved parameter; `scale` stays on the device."""
        with torch.no_grad():
            for slot, direction in zip(self.moved, directions, strict=True):
                if direction is not None:
                    size = scale.to(slot.param.device, slot.param.dtype) * slot.strength
                    slot.param.addcmul_(direction, size)

    def _threads(self) -> int:
        total = sum(slot.param.numel() for slot in self.moved)
        on_cpu = all(slot.param.device.type == "cpu" for slot in self.moved)
        return torch.get_num_threads() if on_cpu and total >= PARALLEL_FROM else 1


def filter_norms(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """‖·‖ of each filter of one tensor, accumulated in `dtype`.

    >>> filter_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.float32)
    tensor([5., 2.])
    """
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    inner = tuple(range(1, tensor.dim())) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=inner, dtype=dtype)
    return norms.reshape(-1)


def _standard_normal(block: Block, seed: int) -> Tensor:
    """Unit noise for one block, drawn in the parameter's own memory order (7 times faster than
    drawing into a channels_last tensor), in float32 for 16-bit parameters."""
    param = block.slot.param
    dtype = torch.promote_types(param.dtype, torch.float32)
    part = block.of(param.detach())
    flat = torch.empty(part.numel(), dtype=dtype, device=param.device)
    standard_normal_(flat, seed)
    if part.dim() < 3 or part.is_contiguous():
        return flat.view(part.shape)
    strides = part.stride()
    order = [0, *sorted(range(1, part.dim()), key=lambda d: -strides[d])]
    back = [order.index(d) for d in range(part.dim())]
    return flat.view([part.shape[d] for d in order]).permute(back)


def _foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _fits(backup: Tensor | None, param: Tensor) -> bool:
    return (
        backup is not None
        and backup.shape == param.shape
        and backup.dtype == param.dtype
        and backup.device == param.device
        and backup.stride() == param.stride()
    )


def _count(filters: slice) -> int:
    return int(filters.stop - filters.start)
