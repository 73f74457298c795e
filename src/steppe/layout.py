"""Layout: the filters of perturbed parameters, the block of noise each takes its values from, and what
this rank holds of them.

A filter is a slice along dimension 0 of a parameter with two or more dimensions; a vector or scalar
parameter is one filter. Per device and dtype, filters are sorted by their length, so that all filters
of one length are one matrix and a step needs a few operations per length instead of per parameter.

Noise belongs to places in the full parameters: a block of it is a run of whole filters in that order.
While a perturbation is in a parameter, nobody else may write it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steppe.noise import CPU_BLOCK, DEVICE_BLOCK

if TYPE_CHECKING:
    from steppe.frozen import FrozenLinear


def is_sharded(tensor: Tensor) -> bool:
    # by its attributes: importing DTensor would slow `import steppe` down
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (a DTensor); any other tensor itself, dense."""
    if is_sharded(tensor):
        return tensor.to_local()  # type: ignore[attr-defined,no-any-return]
    return tensor.to_dense() if tensor.is_sparse else tensor


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """What norms over tensors of these dtypes are computed in: 64 bits if any has them, else 32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def filter_squares(tensor: Tensor) -> Tensor:
    """‖·‖² of each filter of one tensor, in at least 32 bits."""
    rows = local(tensor).reshape(len(tensor) if tensor.dim() > 1 else 1, -1)
    return rows.to(torch.promote_types(tensor.dtype, torch.float32)).square().sum(1)


@dataclass(frozen=True, eq=False)
class Perturbed:
    """One perturbed parameter and its place among all filters."""

    name: str
    param: nn.Parameter
    filters: slice
    offset: tuple[int, ...]
    """Where this rank's part begins, in each dimension of the full parameter."""
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    """The full parameter's, as they were when steppe was attached."""
    always: bool = False
    """Perturbed also where frozen: nothing trains it."""
    layer: FrozenLinear | None = None
    """What computes with noise out of place while the parameter is frozen."""

    @property
    def active(self) -> bool:
        """In training, frozen parameters are never touched, whenever they were frozen."""
        return self.always or self.param.requires_grad

    @property
    def noisy(self) -> bool:
        """Whether it is perturbed, in place or out of place."""
        return self.active or self.layer is not None

    @property
    def values(self) -> Tensor:
        """The values that this rank holds, as a tensor to write in place."""
        return local(self.param.detach())

    @property
    def filter_count(self) -> int:
        return int(self.filters.stop - self.filters.start)

    @property
    def length(self) -> int:
        """Weights per filter."""
        return self.shape.numel() // max(1, self.filter_count)

    def check_unconverted(self) -> None:
        was, now = ((x.dtype, x.device, tuple(x.shape)) for x in (self, self.param))
        if was != now:
            before, after = (
                f"{dtype} on {device}, {shape}," for dtype, device, shape in (was, now)
            )
            raise RuntimeError(
                f"{self.name} was {before} when steppe was attached and is {after} now. Convert the "
                "model first (model.to(), .double(), .cuda()) and attach after that; now detach() and "
                "attach again."
            )


@torch.no_grad()
def stored(params: Sequence[Perturbed]) -> list[Tensor]:
    """The tensors that hold what this rank has of the parameters."""
    return [p.param if type(p.param) is nn.Parameter else local(p.param) for p in params]


def group_factors(
    optimizer: torch.optim.Optimizer | None, *, uphill: bool = False
) -> dict[nn.Parameter, float]:
    """The parameters' own factors (`strength=` in their group) other than 1, as the optimizer has them now.

    `uphill`: with a minus where the optimizer maximizes, for there the loss climbs downhill.
    """
    found: dict[nn.Parameter, float] = {}
    for group in optimizer.param_groups if optimizer else ():
        factor = float(group.get("strength", 1.0)) if group.get("perturb", True) else 0.0
        factor = -factor if uphill and group.get("maximize", False) else factor
        if factor != 1:
            found.update(dict.fromkeys(group["params"], factor))
    return found


def repeated(params: Sequence[Perturbed], values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """One value per parameter, repeated for each of its filters."""
    counts = torch.tensor([p.filter_count for p in params], dtype=torch.long)
    home = params[0].device if params else None
    return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(home)


class Stretch(NamedTuple):
    """Filters of one full parameter, first to last, and where they lie in a block of noise."""

    owner: Perturbed
    first: int
    last: int
    start: int
    stop: int


def noise_blocks(params: Sequence[Perturbed]) -> list[list[Stretch]]:
    """Cut parameters, in this order, into blocks of whole filters."""
    limit = CPU_BLOCK if params[0].device.type == "cpu" else DEVICE_BLOCK
    blocks: list[list[Stretch]] = [[]]
    for p in params:
        first = 0
        while first < p.filter_count:
            used = blocks[-1][-1].stop if blocks[-1] else 0
            room = (limit - used) // p.length
            if used and not room:
                blocks.append([])
                continue
            last = min(p.filter_count, first + max(1, room))
            blocks[-1].append(Stretch(p, first, last, used, used + (last - first) * p.length))
            first = last
    return blocks


def runs_of(rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(number, length) of rows, neighbours of one length taken together."""
    runs: list[tuple[int, int]] = []
    for number, length in rows:
        before = runs.pop()[0] if runs and runs[-1][1] == length else 0
        runs.append((before + number, length))
    return runs


def matrices(flat: Tensor, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Flat memory as one matrix for each run of rows of one length."""
    pieces = flat.split([math.prod(run) for run in runs])
    return [piece.view(run) for piece, run in zip(pieces, runs, strict=True)]


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

    def counted(self, given: dict[Perturbed, Tensor | None]) -> dict[Perturbed, Tensor | None]:
        """Tensors by parameter, without those that another rank counts in a sum."""
        if not self.several:
            return given
        return {p: t if self.counts(p.param) else None for p, t in given.items()}

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


# ---------------------------------------------------------------------- who else writes them

CLOSE_LOOKS = 2
"""In so many moves, values are compared too: data-dependent initialisation, in the first forward, may
write through `.data`, which leaves no trace."""

ALREADY = (
    "The weights are perturbed already. Leave the perturbed() block, or end the pass that is under way "
    "(backward(), perturber.restore()) first."
)


Marks = tuple[tuple[int, ...], tuple[int, ...]]
"""Versions and places of all parameters."""

_version = attrgetter("_version")


class Watch:
    """Compares versions and places of parameters, between a move and the way back."""

    def __init__(self, params: Sequence[Perturbed]) -> None:
        self._params = params
        plain = all(type(p.param) is nn.Parameter for p in params)
        self._stored = stored(params) if plain else None
        self._moved: Sequence[Perturbed] = ()
        self._marks: Marks = ((), ())
        self._norms: Tensor | None = None
        self._close_looks = 0 if any(p.device.type == "meta" for p in params) else CLOSE_LOOKS

    def marks(self) -> Marks:
        tensors = stored(self._params) if self._stored is None else self._stored
        return tuple(map(_version, tensors)), tuple(map(Tensor.data_ptr, tensors))

    def begin(self, moved: Sequence[Perturbed]) -> None:
        self._moved, self._marks = moved, self.marks()
        if moved and self._close_looks:
            self._close_looks -= 1
            self._norms = self._norms_now()

    def written(self) -> bool:
        return bool(self._moved) and self._marks != self.marks()

    def end(self) -> RuntimeError | None:
        """An error, to be raised, that names the moved parameters that were written since `begin`."""
        moved, norms, written = self._moved, self._norms, []
        if not moved:
            return None
        if (marks := self.marks()) != self._marks:
            rows = zip(self._params, *self._marks, *marks, strict=True)
            written = [p.name for p, *then, v, at in rows if then != [v, at] and p in moved]
        if not written and norms is not None:
            now = self._norms_now()
            same = ((norms == now) | (norms.isnan() & now.isnan())).tolist()
            written = [p.name for p, equal in zip(moved, same, strict=True) if not equal]
        self._moved, self._norms = (), None
        if not written:
            return None
        return RuntimeError(
            f"{', '.join(written[:3])}{', …' if written[3:] else ''} changed in the middle of a perturbed pass (or a "
            "perturbed() block), and not by steppe: nn.Embedding(max_norm=…), an optimizer's step, an initialisation "
            "in the first forward, … The weights are back at their values of before the pass, without that change. "
            f"Leave the parameter out, exclude=({written[0]!r},), or change it outside of the pass: before the "
            "forward or after perturber.restore()."
        )

    @torch.no_grad()
    def _norms_now(self) -> Tensor:
        wide = torch.promote_types(
            max((p.dtype for p in self._moved), key=lambda dtype: dtype.itemsize), torch.float32
        )
        norms = torch._foreach_norm([p.values for p in self._moved], 2, dtype=wide)
        return torch.stack([norm.cpu() for norm in norms])
