"""Shards: parameters that are split over ranks (FSDP2), and the few sums that go across them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steppe.slots import is_sharded


class Shards:
    """The ranks that together hold one copy of the weights. By default this rank holds it all."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._modules: list[Any] = []
        self._groups: list[Any] = []
        self._first = True
        params = [] if model is None else [p for p in model.parameters() if is_sharded(p)]
        if params and model is not None:
            self._modules = [m for m in model.modules() if hasattr(m, "reshard")]
            mesh: Any = params[0].device_mesh  # type: ignore[attr-defined]
            placements = params[0].placements  # type: ignore[attr-defined]
            for dim, placement in enumerate(placements):
                if placement.is_shard():
                    self._groups.append(mesh.get_group(dim))
                    self._first = self._first and mesh.get_local_rank(dim) == 0
        self.several = bool(self._groups)
        self.silent = False
        """Set while somebody only looks: one rank may look alone, so nothing may be exchanged, and
        sums that would need it are unknown (NaN)."""

    def offset(self, param: nn.Parameter) -> tuple[int, ...]:
        """Where this rank's part of a parameter begins, in each dimension."""
        if not is_sharded(param):
            return (0,) * param.dim()
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(
            param.shape,
            param.device_mesh,  # type: ignore[attr-defined]
            param.placements,  # type: ignore[attr-defined]
        )
        return tuple(offset)

    def counts(self, tensor: Tensor) -> bool:
        """Whether this rank's part belongs in a sum: what every rank has whole counts once."""
        return self._first or is_sharded(tensor)

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the other shards."""
        if self.silent:
            return tensor.fill_(torch.nan)
        for group in self._groups:
            dist.all_reduce(tensor, group=group)
        return tensor

    @torch.no_grad()
    def reshard(self) -> None:
        """Drop gathered copies of the weights: they are of before the last move."""
        for module in self._modules:
            module.reshard()

    def release_model(self) -> None:
        """Refer to no module and no process group any longer. Nothing is exchanged from now on."""
        self._modules, self._groups = [], []
