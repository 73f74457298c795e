"""What a step costs, measured with torch's FLOP counter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import steppe
from steppe.distributed import release_and_destroy
from steppe.lab.ranks import world

SAMPLES = 32


def step_flops(
    model: nn.Module,
    method: steppe.Method,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    batch: tuple[Tensor, Tensor],
    *,
    batch_size: int,
) -> int:
    """FLOPs of all forward and backward passes of one optimizer step.

    Counted on a copy of the model and at most 32 samples, scaled to the batch size; matrix
    products and convolutions count, as torch's counter has it, element-wise work does not.
    """
    twin = copy.deepcopy(model).train()
    device = next(twin.parameters()).device
    x, y = (part[:SAMPLES].to(device) for part in batch)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _alone() as wrap:
        counted = wrap(twin)
        optimizer = torch.optim.SGD(counted.parameters(), lr=0.0)
        perturber = steppe.attach(counted, optimizer, method, passes_over="microbatches")
        batches = [(x, y)] * method.batches_needed
        with FlopCounterMode(display=False) as counter:
            perturber.backward(lambda x, y: loss_fn(counted(x), y), *batches)
        perturber.detach()
    flops: int = counter.get_total_flops()
    return round(flops * batch_size / len(y))


@contextmanager
def _alone() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """How to wrap a model that runs all passes of a method on this rank alone."""
    if not world().several:
        yield lambda model: model
        return
    group = dist.new_group([world().rank], use_local_synchronization=True)
    try:
        yield lambda model: DistributedDataParallel(model, process_group=group)
    finally:
        release_and_destroy(group)
