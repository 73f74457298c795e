"""What a run costs: FLOPs by torch's counter, and time beside the baseline's."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import steppe
from steppe.lab.results import Result

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

    One pass is counted, on a copy of the model and at most 32 samples, and scaled to batch and method;
    matrix products and convolutions count, as torch's counter has it, element-wise work does not.
    """
    twin = copy.deepcopy(model).train()
    device = next(twin.parameters()).device
    x, y = (part[:SAMPLES].to(device) for part in batch)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), FlopCounterMode(display=False) as counter:
        loss_fn(twin(x), y).backward()
    passes = 1 if method.feed == "slices" else len(method.passes)  # slices share one batch
    flops: int = counter.get_total_flops()
    return round(flops * passes * batch_size / len(y))


def costs(results: Sequence[Result], base: Sequence[Result]) -> dict[str, float]:
    """FLOPs and time as multiples of the baseline's, over pairs of runs; time on equal machines."""
    times = [
        a.cost_seconds / b.cost_seconds
        for a, b in zip(results, base, strict=True)
        if a.status == b.status == "finished" and b.cost_seconds > 0 and a.machine == b.machine
    ]
    found = {"flops": results[0].flops * results[0].steps / max(1, base[0].flops * base[0].steps)}
    if times:
        found["time"] = statistics.median(times)
    return found
