"""What a step costs, measured with torch's FLOP counter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import steppe
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
    batches: Sequence[tuple[Tensor, Tensor]] = [(x, y)] * method.batches_needed
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        _attached(twin, method) as (called, perturber),
        FlopCounterMode(display=False) as counter,
    ):
        perturber.backward(lambda a, b: loss_fn(called(a), b), *batches)
    counted: int = counter.get_total_flops()
    return round(counted * batch_size / len(y))


@contextmanager
def _attached(
    model: nn.Module, method: steppe.Method
) -> Iterator[tuple[nn.Module, steppe.Perturber]]:
    """The model, as it is to be called, with all passes of the method on this rank alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if not world().several:
        perturber = steppe.attach(model, optimizer, method)
        try:
            yield model, perturber
        finally:
            perturber.detach()
        return
    alone = dist.new_group([world().rank], use_local_synchronization=True)
    wrapped = DistributedDataParallel(model, process_group=alone)
    perturber = steppe.attach(wrapped, optimizer, method, passes_over="microbatches")
    try:
        yield wrapped, perturber
    finally:
        perturber.detach()
        dist.destroy_process_group(alone)
