"""Several processes: where this one stands among others, and what they tell each other.

The passes of a method that do not need each other run on different ranks: rows are passes, columns
are data. Gradients are averaged by DDP or FSDP2 itself; a rank's gradient is multiplied by
`passes * weight`, so that the average over all ranks is exactly the weighted sum. What is left to
exchange is small: the norms that ARWP learns from, and BatchNorm's statistics.
"""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from steppe.layout import is_sharded
from steppe.methods import Method
from steppe.perturbations import ElementwiseGaussian

PassesOver = Literal["ranks", "microbatches"]
Noise = Literal["rank", "shared"]
AscentOf = Literal["rank", "global"]

T = TypeVar("T")

MOMENT = 0.2
"""Seconds that gloo's workers get to finish where nothing can wait for them."""


@contextmanager
def process_group(backend: str | None = None, **options: Any) -> Iterator[None]:
    """The processes that torchrun started as one group, and a clean end of the job on the CPU.

    `with steppe.process_group("gloo"): main()` initializes the group (`backend` and `options` go to
    `torch.distributed.init_process_group`) and, when `main` has returned or raised, releases what it
    created and destroys the group. Create models inside of `main`: a gloo group that a model still
    refers to outlives its end, and may then abort or hang the process although all work is done.

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
        release_and_destroy()
        models = _alive(DistributedDataParallel)
        if any(vars(model).get("device_type") == "cpu" for model in models):
            warnings.warn(
                "The process group is destroyed, but a DistributedDataParallel model still refers to "
                "it: the process may abort or hang at its end. Create model, optimizer and perturber "
                "in a function that returns before.",
                stacklevel=3,
            )


def release_and_destroy(group: Any = None) -> None:
    """Destroy a process group (by default all) after collecting the models that used it.

    A gloo group has worker threads, which end when nothing refers to the group any longer. After a
    collective a worker drops its tensors, for which it needs Python's lock. With torch 2.13, a worker
    that is late, as on a loaded machine, aborts the process if the interpreter ends meanwhile
    ("terminate called without an active exception", SIGABRT), and hangs it if a DDP object that was
    the last to refer to the group is released meanwhile. Where `destroy_process_group` drops the last
    reference, it waits for the workers and lets them have the lock. So models go first; being parts
    of reference cycles, they take a collection. Groups of sharded models stay in caches of torch
    whatever one does: their workers get a moment in which the lock is free.
    """
    gc.collect()
    dist.destroy_process_group(group)
    if _alive(DeviceMesh):
        time.sleep(MOMENT)


def _alive(kind: type[T]) -> list[T]:
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _clear_frames(error: BaseException) -> None:
    """Release the variables of the functions that an error and those behind it came through."""
    errors = [error]
    for error in errors:
        traceback.clear_frames(error.__traceback__)
        behind = (error.__cause__, error.__context__)
        errors += [e for e in behind if e is not None and e not in errors]


@dataclass(eq=False)
class Ranks:
    """This process among the replicas that share each step. By default it is alone."""

    groups: tuple[Any, ...] = ()
    """All-reduce over each in turn to reach every rank that brings data."""
    rank: int = 0
    size: int = 1
    """The number of replicas whose gradients are averaged, and which of them this is."""
    passes: int = 1
    """How many passes run at once on different ranks; 1: every rank runs all passes."""
    noise: Noise = "rank"
    ddp: DistributedDataParallel | None = None
    ascent: AscentOf = "rank"
    _old_groups: list[tuple[nn.SyncBatchNorm, Any]] = field(default_factory=list)

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

    def narrow_sync_batchnorm(self, model: nn.Module) -> None:
        """Let SyncBatchNorm share statistics among the ranks of one pass only."""
        layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        if not layers or self.index is None or self.ddp is None:
            return
        mine = range(self.index * self.columns, (self.index + 1) * self.columns)
        ranks = [dist.get_global_rank(self.groups[0], r) for r in mine]
        group = dist.new_group(ranks, use_local_synchronization=True)
        for layer in layers:
            self._old_groups.append((layer, layer.process_group))
            layer.process_group = group

    def let_go(self) -> None:
        """Give SyncBatchNorm its groups back and forget the model."""
        while self._old_groups:
            layer, group = self._old_groups.pop()
            layer.process_group = group
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
    if any(isinstance(p.perturbation, ElementwiseGaussian) for p in method.passes):
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


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter (tied ones have several), without what wrappers add."""
    wrappers = [
        f"{name}.module.".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel) or getattr(module, "only_wraps", False)
    ]
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        for wrapper in reversed(wrappers):  # inner ones first
            if name.startswith(wrapper):
                name = wrapper.removesuffix("module.") + name.removeprefix(wrapper)
        for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
            name = name.replace(wrapper, "")
        names.setdefault(param, []).append(name)
    return names
