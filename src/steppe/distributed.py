"""Several processes: where this one stands among others, and what they tell each other.

The passes of a method that do not need each other run on different ranks: rows are passes, columns
are data. Gradients are averaged by DDP or FSDP2 itself; a rank's gradient is multiplied by
`passes * weight`, so that the average over all ranks is exactly the weighted sum. What is left to
exchange is small: the norms that ARWP learns from, BatchNorm's statistics, and sums over shards.
"""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from steppe.methods import Method

PassesOver = Literal["ranks", "microbatches"]
Noise = Literal["rank", "shared"]
AscentOf = Literal["rank", "global"]


def is_sharded(tensor: Tensor) -> bool:
    # by its attributes: importing DTensor would slow `import steppe` down
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (a DTensor); any other tensor itself, dense."""
    if is_sharded(tensor):
        return tensor.to_local()  # type: ignore[attr-defined,no-any-return]
    return tensor.to_dense() if tensor.is_sparse else tensor


@contextmanager
def process_group(backend: str | None = None, **options: Any) -> Iterator[None]:
    """The processes that torchrun started as one group, and a clean end of the job on the CPU.

    `with steppe.process_group("gloo"): main()` initializes the group (`backend` and `options` go to
    `torch.distributed.init_process_group`) and, after `main`, releases what it created and destroys the
    group. Create models inside of `main`: a gloo group that a model still refers to outlives its end.

    Examples:
        >>> with process_group("gloo", store=dist.HashStore(), rank=0, world_size=1):
        ...     dist.get_world_size()
        1
    """
    dist.init_process_group(backend, **options)
    try:
        yield
    except BaseException as error:
        _clear_frames(error)  # they hold the variables of `main`
        raise
    finally:
        _release_and_destroy()
        models = alive(DistributedDataParallel)
        if any(vars(model).get("device_type") == "cpu" for model in models):
            warnings.warn(
                "The process group is destroyed, but a DistributedDataParallel model still refers to "
                "it: the process may abort or hang at its end. Create model, optimizer and perturber "
                "in a function that returns before.",
                stacklevel=3,
            )


def _release_and_destroy() -> None:
    """Destroy all process groups after collecting the models that used them.

    With torch 2.13, a worker thread of gloo that is late aborts the process where the interpreter ends
    meanwhile, or hangs it where a DDP object is the last to refer to the group. `destroy_process_group`
    waits for workers if it drops the last reference: so models go first, which takes a collection.
    Groups of sharded models stay in caches of torch, and get a moment to finish.
    """
    gc.collect()
    dist.destroy_process_group()
    if alive(DeviceMesh):
        time.sleep(0.2)


def alive(kind: type) -> list[Any]:
    """All objects of a kind, wherever they are referred to."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _clear_frames(error: BaseException) -> None:
    """Release the variables of the functions that an error and those behind it came through."""
    errors = [error]
    for e in errors:
        traceback.clear_frames(e.__traceback__)
        errors += [b for b in (e.__cause__, e.__context__) if b is not None and b not in errors]


@dataclass(eq=False)
class Ranks:
    """This process among the replicas that share each step. By default it is alone."""

    groups: tuple[Any, ...] = ()
    """All-reduce over each in turn to reach every rank that brings data."""
    rank: int = 0
    size: int = 1
    """How many replicas average their gradients, and which of them this is."""
    passes: int = 1
    """How many passes run at once on different ranks; 1: every rank runs all passes."""
    noise: Noise = "rank"
    ddp: DistributedDataParallel | None = None
    ascent: AscentOf = "rank"

    @property
    def averages(self) -> bool:
        """Whether something averages gradients over ranks while backward runs."""
        return self.size > 1 or bool(self.groups)

    @property
    def columns(self) -> int:
        """How many replicas share the data of one pass."""
        return self.size // self.passes

    @property
    def index(self) -> int | None:
        """The one pass that this rank runs, if passes run on different ranks. Rank 0: the first."""
        return self.rank * self.passes // self.size if self.passes > 1 else None

    @property
    def replica(self) -> int:
        """Ranks with different replicas draw different noise."""
        return 0 if self.noise == "shared" else self.rank % self.columns

    def scouting(self) -> AbstractContextManager[Any]:
        """Around SAM's first pass: without communication, if each rank climbs by itself."""
        if self.ddp is not None and self.ascent == "rank":
            return self.ddp.no_sync()
        return nullcontext()

    def sum(self, *vectors: Tensor) -> list[Tensor]:
        """The sums over all ranks of several vectors, in one message."""
        if not self.groups:
            return list(vectors)
        sizes = [v.numel() for v in vectors]
        message = torch.cat([v.flatten() for v in vectors])
        for group in self.groups:
            dist.all_reduce(message, group=group)
        return [p.view(v.shape) for p, v in zip(message.split(sizes), vectors, strict=True)]

    def mean(self, sums: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Sums divided by how many were added, those of all ranks."""
        if not self.groups:
            return [s / n if n else s for s, n in zip(sums, counts, strict=True)]
        both = torch.stack([*sums, *(sums[0].new_tensor(float(n)) for n in counts)])
        totals, numbers = self.sum(both)[0].chunk(2)
        return list((totals / numbers).unbind())

    def let_go(self) -> None:
        """Refer to no model and no process group any longer."""
        self.ddp, self.groups = None, ()


class Asked(NamedTuple):
    """What the user asked for; None: whatever is usual."""

    passes_over: PassesOver | None = None
    noise: Noise | None = None
    ascent: AscentOf | None = None


def find_ranks(model: nn.Module, method: Method, asked: Asked) -> Ranks:
    """Look at how the model is wrapped, and place the passes accordingly or say why not."""
    if not (dist.is_available() and dist.is_initialized()):
        if asked.passes_over == "ranks":
            raise RuntimeError(
                'passes_over="ranks" needs a process group: start with torchrun, call '
                "torch.distributed.init_process_group() and wrap the model in DDP."
            )
        return Ranks()
    sharded = [p for p in model.parameters() if is_sharded(p)]
    if sharded:
        return _over_mesh(sharded[0], method, asked)
    ddp = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if ddp is not None:
        return _over_ddp(ddp, method, asked)
    world = dist.get_world_size()
    if world > 1 or asked.passes_over == "ranks":
        raise RuntimeError(
            f"There are {world} ranks, but the model is not wrapped, so nothing averages its "
            "gradients. Wrap it first: attach(DistributedDataParallel(model), ...), or "
            "torch.distributed.fsdp.fully_shard(model)."
        )
    return Ranks()


def _over_ddp(ddp: DistributedDataParallel, method: Method, asked: Asked) -> Ranks:
    group = ddp.process_group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if method.in_sequence and asked.ascent != "global" and ddp.static_graph:
        raise RuntimeError(
            f"{method.name}() climbs on each rank without communication (no_sync), which DDP's "
            'static_graph does not allow on its first step. Use attach(..., ascent="global").'
        )
    passes = _passes_over_ranks(method, size, asked.passes_over)
    noise, ascent = asked.noise or "rank", asked.ascent or "rank"
    return Ranks((group,), rank, size, passes, noise, ddp, ascent)


def _over_mesh(param: Any, method: Method, asked: Asked) -> Ranks:
    mesh, placements = param.device_mesh, param.placements
    groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    if asked.ascent == "rank" and method.in_sequence:
        raise ValueError('Sharded parameters have one gradient for all ranks: use ascent="global".')
    replicated = [dim for dim, placement in enumerate(placements) if not placement.is_shard()]
    several = len(method.passes) > 1 and not method.in_sequence
    if not replicated:
        if several:
            raise RuntimeError(
                f"{method.name}() runs its {len(method.passes)} passes on different replicas, and a 1-D FSDP "
                "mesh has only one. Shard over a 2-D mesh, init_device_mesh(device, (2, shards), "
                'mesh_dim_names=("replicate", "shard")), or use a method of one pass (arwp, rwp).'
            )
        if asked.noise == "rank":
            raise ValueError(
                'noise="rank" would give the shards of one model different noise. Leave it out, or '
                "use a 2-D mesh, whose replicas draw their own."
            )
        return Ranks(groups, noise="shared", ascent="global")
    size, rank = mesh.size(replicated[0]), mesh.get_local_rank(replicated[0])
    if several and asked.passes_over == "microbatches":
        raise RuntimeError(
            f'{method.name}() on a mesh runs its passes on different replicas; passes_over="microbatches" '
            "is not supported there."
        )
    passes = _passes_over_ranks(method, size, asked.passes_over)
    return Ranks(groups, rank, size, passes, asked.noise or "rank", ascent="global")


def _passes_over_ranks(method: Method, size: int, passes_over: PassesOver | None) -> int:
    count = len(method.passes)
    if count == 1 or passes_over == "microbatches":
        return 1
    if method.in_sequence:
        if passes_over == "ranks":
            raise RuntimeError(
                f"The passes of {method.name}() need each other's gradients and cannot run on "
                "different ranks at once."
            )
        return 1
    if method.same_batch:
        raise RuntimeError(
            f"{method.name}(same_batch=True) wants one batch in all passes, but every rank brings its "
            'own. Use passes_over="microbatches" with perturber.backward(loss_of, batch).'
        )
    if any(p.perturbation is not None and p.perturbation.elementwise for p in method.passes):
        raise RuntimeError(
            f"{method.name}(elementwise=True) over ranks would exchange a history as large as the "
            'model. Use the filter-wise form, or passes_over="microbatches".'
        )
    if size % count:
        works = ", ".join(str(count * k) for k in range(1, 4))
        raise RuntimeError(
            f"{method.name}() runs {count} passes on different ranks, which {size} cannot be divided "
            f'into; {works}, … ranks work. Or choose passes_over="microbatches".'
        )
    return count


class Shards:
    """The ranks that together hold one copy of the weights. By default this rank holds it all."""

    def __init__(self, model: nn.Module | None = None) -> None:
        named = model.named_parameters() if model is not None else ()
        params = {name: param for name, param in named if is_sharded(param)}
        self._modules = sharding(model) if model is not None and params else []
        self._group: Any = None
        self._first = True
        if params:
            self._check(params)
            mesh, kinds = _sharding(next(iter(params.values())))
            if "Shard" in kinds:
                self._group = mesh.get_group(kinds.index("Shard"))
                self._first = mesh.get_local_rank(kinds.index("Shard")) == 0
        self.several = self._group is not None
        self.silent = False
        """Set while somebody only looks, maybe on one rank alone: sums are unknown (NaN) then."""

    def _check(self, params: dict[str, Any]) -> None:
        """Refuse what is not FSDP2's own sharding: norms would be sums over the wrong ranks."""
        gathered = {param for module in self._modules for param in module.parameters()}
        first = next(iter(params.values()))
        for name, param in params.items():
            mesh, kinds = _sharding(param)
            known = set(kinds) <= {"Shard", "Replicate"} and kinds.count("Shard") <= 1
            if known and param in gathered and (mesh, kinds) == _sharding(first):
                continue
            raise ValueError(
                f"{name} is sharded by {param.placements} over {mesh}, "
                f"{next(iter(params))} by {first.placements}"
                f"{'' if param in gathered else ', and not by fully_shard()'}. steppe serves what "
                "fully_shard() makes on one mesh: one dimension of shards and, before it, at most one of "
                "replicas. Other DTensors (tensor parallel ones, also mixed with FSDP) are not supported: shard the "
                "whole model with fully_shard(model, mesh=mesh)."
            )

    def offset(self, param: Any) -> tuple[int, ...]:
        """Where this rank's part of a parameter begins, in each dimension."""
        if not is_sharded(param):
            return tuple(0 for _ in param.shape)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = param.device_mesh, param.placements
        return tuple(compute_local_shape_and_global_offset(param.shape, mesh, placements)[1])

    def counts(self, param: Tensor) -> bool:
        """Whether this rank's part belongs in a sum: what every rank has whole counts once."""
        return self._first or is_sharded(param)

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the other shards."""
        if self.silent:
            return tensor.fill_(torch.nan)
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    @torch.no_grad()
    def reshard(self) -> None:
        """Drop gathered copies of the weights: they are of before the last move."""
        for module in self._modules:
            module.reshard()

    def let_go(self) -> None:
        """Refer to no module and no process group any longer. Nothing is exchanged from now on."""
        self._modules, self._group = [], None


def sharding(model: nn.Module) -> list[Any]:
    """The modules whose parameters FSDP2 shards."""
    return [module for module in model.modules() if hasattr(module, "reshard")]


def _sharding(param: Any) -> tuple[Any, list[str]]:
    """The mesh of a parameter, and what each of its dimensions does (whatever dimension is cut)."""
    return param.device_mesh, [type(placement).__name__ for placement in param.placements]
