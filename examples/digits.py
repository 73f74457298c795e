"""Flat minima in one line: an MLP on scikit-learn's digits, a fifth of its labels wrong.

Trains SGD, RWP, ARWP (same cost), SAM and m-ARWP (twice the gradients) from the same
initial weights and prints the test accuracy of each. Takes under a minute on two cores.

    python examples/digits.py [--seeds 5]
"""

import argparse
import math
import statistics

import torch
from sklearn.datasets import load_digits
from torch import nn

import steppe

STEPS, BATCH, TRAIN = 600, 32, 400


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """400 training images with 20 % of the labels replaced at random; the rest is for testing."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    noisy = y[:TRAIN].clone()
    wrong = torch.rand(TRAIN, generator=generator) < 0.2
    noisy[wrong] = torch.randint(0, 10, (TRAIN,), generator=generator)[wrong]
    return x[:TRAIN], noisy, x[TRAIN:], y[TRAIN:]


def train(method: steppe.Method, seed: int) -> float:
    """Test accuracy of the final model, in per cent."""
    x, y, test_x, test_y = data(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    perturber = steppe.attach(model, optimizer, method, seed=seed)

    def loss_of(index: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x[index]), y[index])

    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        batches = [
            torch.randint(0, TRAIN, (BATCH,), generator=generator)
            for _ in range(method.batches_needed)
        ]
        perturber.backward(loss_of, *batches)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        return 100 * (model(test_x).argmax(1) == test_y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (default 5)")
    seeds = range(parser.parse_args().seeds)
    rising = steppe.cosine_increase(0, 0.9, STEPS)
    methods = {
        "SGD": steppe.sgd(),
        "SAM": steppe.sam(0.2),
        "RWP": steppe.rwp(ratio=rising),
        "ARWP": steppe.arwp(ratio=rising),
        "m-RWP": steppe.m_rwp(ratio=0.9),
        "m-ARWP": steppe.m_arwp(ratio=0.9),
    }
    torch.set_num_threads(1)
    print(f"digits, {TRAIN} training images, 20 % of labels replaced, {len(seeds)} seeds")
    print(f"{'method':8}{'test accuracy, mean ± std':>28}{'gain over SGD ± stderr':>26}")
    base: list[float] = []
    for name, method in methods.items():
        found = [train(method, seed) for seed in seeds]
        base = base or found
        gains = [a - b for a, b in zip(found, base, strict=True)]
        spread = statistics.stdev(found) if len(found) > 1 else math.nan
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        accuracy = f"{statistics.mean(found):.2f} ± {spread:.2f}"
        print(f"{name:8}{accuracy:>28}{statistics.mean(gains):>+17.2f} ± {error:.2f}", flush=True)


if __name__ == "__main__":
    main()
