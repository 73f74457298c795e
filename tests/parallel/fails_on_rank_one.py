"""A job for torchrun in which rank 1 fails in the middle of training."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steppe.attach(model, optimizer, steppe.rwp(0.05))
for step in range(3):
    true = weights_of(model)
    try:
        x, y = batch(10 * step + rank)
        if step == 2 and rank == 1:
            raise ValueError("the data of rank 1 are broken")
        loss_fn(model(x), y).backward()
    except RuntimeError:
        # the surviving rank: its backward failed for want of the other
        Path(sys.argv[1]).write_text(f"true weights: {equal(true, weights_of(model))}")
        raise
    optimizer.step()
    optimizer.zero_grad()
os._exit(0)
