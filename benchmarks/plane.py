"""One plane of losses, ours or the loop that one writes first, timed in a process of its own.

    python benchmarks/plane.py ours|naive --grid 5

Called by `benchmarks/analysis.py`. A process each, because the memory allocator learns from what ran
before: one contender would pay for the other, or be paid for.
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from steppe.analysis import Problem, landscape
from steppe.analysis.directions import filter_normalised
from steppe.lab.models.resnet import ResNet


def trained(steps: int, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A ResNet-8 of about 76 k weights that has learned which of ten smooth patterns lies under the noise of an image."""
    model = ResNet(10, (3, 32, 32), blocks=(1, 1, 1), base=16)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.reset_parameters()  # torch's own initial weights
    y = torch.randint(10, (samples,))
    patterns = F.interpolate(torch.randn(10, 3, 4, 4), size=32, mode="bilinear")
    x = patterns[y] + torch.randn(samples, 3, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        rows = torch.arange(64) + 64 * step
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows % samples]), y[rows % samples]).backward()
        optimizer.step()
    return model.eval(), x, y


def naive(model: nn.Module, data: TensorDataset, axis: list[float]) -> Tensor:
    """`load_state_dict` at each point, then loss and accuracy over a DataLoader."""
    loader = DataLoader(data, batch_size=128)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    centre = [state[name] for name in names]
    d1, d2 = (filter_normalised(centre, seed) for seed in (0, 1))
    surface = torch.zeros(len(axis), len(axis), 2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for i, a in enumerate(axis):
            for j, b in enumerate(axis):
                moved = zip(names, centre, d1, d2, strict=True)
                point = {name: w + a * u + b * v for name, w, u, v in moved}
                model.load_state_dict({**state, **point})
                total, hits, count = 0.0, 0, 0
                for x, y in loader:
                    output = model(x)
                    total += F.cross_entropy(output, y).item() * len(x)
                    hits += (output.argmax(1) == y).sum().item()
                    count += len(x)
                surface[i, j] = torch.tensor([total / count, hits / count])
    return surface[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("who", choices=["ours", "naive"])
    parser.add_argument("--grid", type=int, default=25)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--steps", type=int, default=150, help="of training before")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, x, y = trained(options.steps, options.samples)
    n = options.grid
    axis = [(2 * i + 1 - n) / (n - 1) for i in range(n)]
    start = time.process_time()
    if options.who == "ours":
        loss = landscape(Problem(model, F.cross_entropy, (x, y)), n=n).loss
    else:
        loss = naive(model, TensorDataset(x, y), axis)
    print(json.dumps({"seconds": time.process_time() - start, "loss": loss.tolist()}))


if __name__ == "__main__":
    main()
