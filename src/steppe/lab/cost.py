"""What a step costs, measured with torch's FLOP counter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import steppe

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
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    perturber = steppe.attach(twin, optimizer, method)
    device = next(twin.parameters()).device
    x, y = (part[:SAMPLES].to(device) for part in batch)
    batches: Sequence[tuple[Tensor, Tensor]] = [(x, y)] * method.batches_needed
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), FlopCounterMode(display=False) as counter:
            perturber.backward(lambda a, b: loss_fn(twin(a), b), *batches)
    finally:
        perturber.detach()
    counted: int = counter.get_total_flops()
    return round(counted * batch_size / len(y))
