"""m-ARWP over two processes: one computes the clean gradient, the other the perturbed one.

    torchrun --nproc-per-node 2 examples/ddp.py

Any even number of processes works: the first half is clean, the second half perturbed. The loop is
an ordinary DDP loop with one line added. Runs on the CPU over gloo in a few seconds.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import steppe


def main() -> None:
    rank = dist.get_rank()
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    perturber = steppe.attach(model, optimizer, steppe.m_arwp(ratio=0.6))

    for rank_in_turn in range(dist.get_world_size()):
        if rank == rank_in_turn:
            print(f"rank {rank}: {str(perturber).splitlines()[1].strip()}", flush=True)
        dist.barrier()

    batches = torch.Generator().manual_seed(rank)  # every rank brings batches of its own
    for step in range(300):
        index = torch.randint(0, 1000, (64,), generator=batches)
        loss = nn.functional.cross_entropy(model(x[index]), y[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f} (clean pass)", flush=True)

    model.eval()
    with torch.no_grad():
        accuracy = (model(x[1000:]).argmax(1) == y[1000:]).float().mean().item()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    replicas = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, weights)
    if rank == 0:
        same = all(torch.equal(weights, other) for other in replicas)
        print(f"test accuracy {100 * accuracy:.1f} %; replicas bit-identical: {same}", flush=True)


if __name__ == "__main__":
    with steppe.process_group("gloo"):
        main()
