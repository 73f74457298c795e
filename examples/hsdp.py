"""m-ARWP on a 2-D mesh (HSDP): replicas carry the passes, shards carry the weights.

    torchrun --nproc-per-node 4 examples/hsdp.py

Two replicas of two shards each: the first replica computes the clean gradient, the second the
perturbed one; no rank ever gathers a full parameter to perturb it. Runs on the CPU over gloo.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import steppe


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    perturber = steppe.attach(model, optimizer, steppe.m_arwp(ratio=0.6))
    if rank == world - 1:
        print(f"rank {rank}: {str(perturber).splitlines()[1].strip()}", flush=True)

    batches = torch.Generator().manual_seed(rank)
    for step in range(200):
        index = torch.randint(0, 1000, (32,), generator=batches)
        loss = nn.functional.cross_entropy(model(x[index]), y[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f} (clean pass)", flush=True)

    model.eval()
    with torch.no_grad():
        accuracy = (model(x[1000:]).argmax(1) == y[1000:]).float().mean().item()
    if rank == 0:
        print(f"test accuracy {100 * accuracy:.1f} %", flush=True)


if __name__ == "__main__":
    with steppe.process_group("gloo"):
        main()
