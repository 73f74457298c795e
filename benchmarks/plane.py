"""One plane of losses, ours or the loop that one writes first, timed in a process of its own.

    python benchmarks/plane.py ours --grid 5
    python benchmarks/plane.py naive --grid 5 --batch 128

Called by `benchmarks/analysis.py`. A process each, because the memory allocator learns from what ran
before: one contender would pay for the other, or be paid for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from resnet8 import trained

from steppe.analysis import Problem, landscape
from steppe.analysis.directions import filter_normalised


class Images(Dataset[tuple[Tensor, int]]):
    """Stored bytes made into a tensor sample by sample, as torchvision's CIFAR-10 does."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        low, high = x.min(), x.max()
        self.pixels = ((x - low) / (high - low) * 255).byte().permute(0, 2, 3, 1).numpy()
        self.labels = y.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.array(Image.fromarray(self.pixels[index]))
        image = torch.from_numpy(pixels).permute(2, 0, 1).contiguous().float().div(255)
        mean, std = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.2, 0.2, 0.2])
        return image.sub_(mean[:, None, None]).div_(std[:, None, None]), self.labels[index]


def naive(model: nn.Module, data: Dataset[Any], batch: int, axis: list[float]) -> Tensor:
    """`load_state_dict` at each point, then loss and accuracy over a DataLoader."""
    loader = DataLoader(data, batch_size=batch)
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
    parser.add_argument("who", choices=["ours", "naive", "images"])
    parser.add_argument("--grid", type=int, default=25)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--steps", type=int, default=150, help="of training before")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, x, y = trained(options.steps, options.samples)
    n = options.grid
    axis = [(2 * i + 1 - n) / (n - 1) for i in range(n)]
    data: Dataset[Any] = Images(x, y) if options.who == "images" else TensorDataset(x, y)
    start = time.process_time()
    if options.who == "ours":
        loss = landscape(Problem(model, F.cross_entropy, (x, y)), n=n).loss
    else:
        loss = naive(model, data, options.batch, axis)
    print(json.dumps({"seconds": time.process_time() - start, "loss": loss.tolist()}))


if __name__ == "__main__":
    main()
