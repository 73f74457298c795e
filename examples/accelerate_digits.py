"""Flat minima with Accelerate: prepare, then attach. About 15 seconds on an idle core.

One process: m-ARWP runs its two passes over two micro-batches of a step.

    python examples/accelerate_digits.py

Two processes: the passes run at once, one on each rank, over micro-batches of their own.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py
"""

import argparse
import gc

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steppe

TRAIN, BATCH = 400, 32


def data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """400 training images with 20 % of the labels replaced at random; the rest is for testing."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    wrong = torch.rand(TRAIN, generator=generator) < 0.2
    noisy = torch.where(wrong, torch.randint(0, 10, (TRAIN,), generator=generator), y[:TRAIN])
    return TensorDataset(x[:TRAIN], noisy), x[TRAIN:], y[TRAIN:]


def train(accelerator: Accelerator, method: steppe.Method, epochs: int) -> float:
    """Test accuracy of the final model, in per cent."""
    set_seed(0)
    training, test_x, test_y = data()
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(training, BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    perturber = steppe.attach(model, optimizer, method)
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    perturber.detach()
    accelerator.free_memory()
    model.eval()
    with torch.no_grad():
        return 100 * (model(test_x).argmax(1) == test_y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two epochs: only to see it run")
    epochs = 2 if parser.parse_args().quick else 60
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.print(f"{accelerator.num_processes} process(es), 2 micro-batches a step each")
    for name, method in {
        "SGD": steppe.sgd(),
        "ARWP": steppe.arwp(ratio=0.6),
        "m-ARWP": steppe.m_arwp(ratio=0.9),
    }.items():
        accelerator.print(f"{name:8}{train(accelerator, method, epochs):.2f} %")
    gc.collect()  # models of several processes go before their process group
    accelerator.end_training()


if __name__ == "__main__":
    main()
