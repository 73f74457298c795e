"""Slots: perturbed parameters, their filters and their blocks of noise, whole or sharded.

A filter is a slice along dimension 0 of a parameter with two or more dimensions; a vector or scalar
parameter is one filter. Everything is numbered by the parameter's *full* shape, so that filters,
norms and noise are the same however it is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from steppe.noise import standard_normal_


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (a DTensor); any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    # told by its face: importing DTensor would slow `import steppe` down
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


@dataclass(frozen=True, eq=False)
class Slot:
    """One perturbed parameter and its place among all filters and noise blocks."""

    name: str
    param: nn.Parameter
    group: dict[str, Any]
    filters: slice
    rows_per_block: int
    first_block: int
    offset: tuple[int, ...]
    """Where this rank's part begins, in each dimension of the full parameter."""

    @property
    def active(self) -> bool:
        """Frozen parameters are never touched, whenever they were frozen."""
        return self.param.requires_grad

    @property
    def strength(self) -> float:
        """The parameter group's own factor on the strength (`strength=` in the group)."""
        return float(self.group.get("strength", 1.0))

    @property
    def values(self) -> Tensor:
        """The values that this rank holds, as a tensor to write in place."""
        return local(self.param.detach())

    @property
    def filter_count(self) -> int:
        return int(self.filters.stop - self.filters.start)

    @property
    def my_filters(self) -> slice:
        """The filters that this rank holds rows of, among all filters."""
        if self.param.dim() < 2:
            return self.filters
        first = self.filters.start + self.offset[0]
        return slice(first, first + self.values.shape[0])

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of noise that this rank's values need any part of."""
        return tuple(self._blocks(self.values))

    def _blocks(self, values: Tensor) -> Iterator[Block]:
        if values.numel() == 0:
            return
        rows = self.param.shape[0] if self.param.dim() else 1
        first = self.offset[0] if self.offset else 0
        last = first + (values.shape[0] if values.dim() else 1)
        step = self.rows_per_block
        for number in range(first // step, -(-last // step)):
            start, stop = number * step, min((number + 1) * step, rows)
            keep = slice(max(start, first), min(stop, last))
            yield Block(self, start, stop, keep, self.first_block + number)


class Rows:
    """This rank's part of a parameter as rows (slices along dimension 0) in their memory's order.

    Noise is drawn in this order, which is seven times faster than drawing into a channels_last
    tensor. Where a row is one stretch of memory, it is one dimension here: less to do per block.
    """

    def __init__(self, slot: Slot, std: Tensor, sign: float, extra: Tensor | None = None) -> None:
        values = slot.values
        self._offset = slot.offset if is_sharded(slot.param) else None
        whole = self._offset is None
        self._order, self._row = _layout(slot.param.shape, values.stride(), whole)
        self.values = self._arranged(values)
        self.extra = None if extra is None else self._arranged(extra)
        place = slot.my_filters
        mine = std.narrow(0, place.start, place.stop - place.start).to(values.device)
        if (factor := sign * slot.strength) != 1:
            mine = mine * factor
        self.std = mine.view(-1, *[1] * len(self._row)) if len(self._order) > 1 else mine[0]

    def _arranged(self, tensor: Tensor) -> Tensor:
        if len(self._order) < 3:
            return tensor
        ordered = tensor.permute(self._order)
        return ordered.flatten(1) if len(self._row) < len(self._order) - 1 else ordered

    def standard_normal(self, block: Block, seed: int) -> Tensor:
        """Unit noise for this rank's part of a block, in float32 for 16-bit parameters.

        The block is always drawn at its full length and then cut: torch's normal values depend on
        how many are drawn at once.
        """
        values = self.values
        dtype = values.dtype if values.dtype.itemsize >= 4 else torch.float32
        shape = [block.stop - block.start, *self._row] if self._order else []
        eps = standard_normal_(torch.empty(shape, dtype=dtype, device=values.device), seed)
        if self._offset is None or not eps.dim():
            return eps
        eps = eps[block.keep.start - block.start : block.keep.stop - block.start]
        for place, dim in enumerate(self._order[1:], start=1):
            eps = eps.narrow(place, self._offset[dim], values.shape[place])
        return eps


@lru_cache(maxsize=4096)
def _layout(
    full: tuple[int, ...], strides: tuple[int, ...], whole: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions in their memory's order, and a row's shape in that order."""
    inner = sorted(range(1, len(full)), key=lambda d: -strides[d])
    row = tuple(full[d] for d in inner)
    together = all(strides[a] == strides[b] * full[b] for a, b in pairwise(inner))
    if whole and together and len(inner) > 1:
        row = (math.prod(row),)
    return (0, *inner) if full else (), row


@dataclass(frozen=True, eq=False)
class Block:
    """Whole filters of one parameter (or a stretch of a vector) that are drawn together."""

    slot: Slot
    start: int
    stop: int
    keep: slice
    """The rows of the full parameter that this rank holds of the block."""
    number: int

    def of(self, values: Tensor) -> Tensor:
        """This block's part of values like this rank's, or of some that broadcast over them."""
        count = self.keep.stop - self.keep.start
        if not values.dim() or values.shape[0] == count:
            return values
        return values.narrow(0, self.keep.start - self.slot.offset[0], count)


def filter_norms(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """‖·‖ of each filter of one tensor, accumulated in `dtype`.

    Examples:
        >>> filter_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.float32)
        tensor([5., 2.])
    """
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    inner = tuple(range(1, tensor.dim())) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=inner, dtype=dtype)
    return norms.reshape(-1)
