"""Shards: parameters that are split over ranks (FSDP2), and the few sums that go across them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steppe.layout import is_sharded


class Shards:
    """The ranks that together hold one copy of the weights. By default this rank holds it all."""

    def __init__(self, model: nn.Module | None = None) -> None:
        named = [] if model is None else list(model.named_parameters())
        params = {name: param for name, param in named if is_sharded(param)}
        self._modules: list[Any] = []
        self._groups: list[Any] = []
        self._first = True
        if params and model is not None:
            self._modules = sharding(model)
            self._check(params)
            mesh, kinds = _sharding(next(iter(params.values())))
            for dim in (dim for dim, kind in enumerate(kinds) if kind == "Shard"):
                self._groups.append(mesh.get_group(dim))
                self._first = self._first and mesh.get_local_rank(dim) == 0
        self.several = bool(self._groups)
        self.silent = False
        """Set while somebody only looks: one rank may look alone, so nothing may be exchanged, and
        sums that would need it are unknown (NaN)."""

    def _check(self, params: dict[str, nn.Parameter]) -> None:
        """Refuse what is not FSDP2's own sharding: norms would be sums over the wrong ranks."""
        gathered = {param for module in self._modules for param in module.parameters()}
        first = next(iter(params.values()))
        for name, param in params.items():
            mesh, kinds = _sharding(param)
            known = set(kinds) <= {"Shard", "Replicate"} and kinds.count("Shard") <= 1
            if known and param in gathered and (mesh, kinds) == _sharding(first):
                continue
            raise ValueError(
                f"{name} is sharded by {param.placements} over {mesh}, "  # type: ignore[attr-defined]
                f"{next(iter(params))} by {first.placements}"  # type: ignore[attr-defined]
                f"{'' if param in gathered else ', and not by fully_shard()'}. steppe serves what "
                "fully_shard() makes on one mesh: one dimension of shards and, before it, at most one of "
                "replicas. Other DTensors (tensor parallel ones, also mixed with FSDP) are not supported: shard the "
                "whole model with fully_shard(model, mesh=mesh)."
            )

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

    def let_go(self) -> None:
        """Refer to no module and no process group any longer. Nothing is exchanged from now on."""
        self._modules, self._groups = [], []


def sharding(model: nn.Module) -> list[Any]:
    """The modules whose parameters FSDP2 shards."""
    return [module for module in model.modules() if hasattr(module, "reshard")]


def _sharding(param: Any) -> tuple[Any, list[str]]:
    """The mesh of a parameter, and what each of its dimensions does (whatever dimension is cut)."""
    return param.device_mesh, [type(placement).__name__ for placement in param.placements]
