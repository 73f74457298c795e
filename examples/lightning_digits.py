"""Flat minima under Lightning: an MLP on scikit-learn's digits, a fifth of its labels wrong.

One callback for each method; the LightningModule does not change. About 20 seconds on an idle core.

    python examples/lightning_digits.py
"""

import argparse
import logging
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steppe
from steppe.integrations.lightning import Perturb

TRAIN, BATCH = 400, 32


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def data() -> tuple[TensorDataset, TensorDataset]:
    """400 training images with 20 % of the labels replaced at random; the rest is for testing."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    wrong = torch.rand(TRAIN, generator=generator) < 0.2
    noisy = torch.where(wrong, torch.randint(0, 10, (TRAIN,), generator=generator), y[:TRAIN])
    return TensorDataset(x[:TRAIN], noisy), TensorDataset(x[TRAIN:], y[TRAIN:])


def train(method: steppe.Method | None, epochs: int, accumulate: int = 1) -> float:
    """Test accuracy of the final model, in per cent."""
    seed_everything(0, verbose=False)
    training, testing = data()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs * accumulate,  # the same number of optimizer steps for all
        accumulate_grad_batches=accumulate,
        callbacks=[] if method is None else [Perturb(method)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Digits()
    trainer.fit(module, DataLoader(training, BATCH, shuffle=True, drop_last=True))
    (result,) = trainer.test(module, DataLoader(testing, len(testing)), verbose=False)
    return 100 * result["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two epochs: only to see it run")
    epochs = 2 if parser.parse_args().quick else 30
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    rising = steppe.cosine_increase(0, 0.9)  # the callback fills in how long training is
    print(f"SGD     {train(None, epochs):.2f} %")
    print(f"ARWP    {train(steppe.arwp(ratio=rising), epochs):.2f} %")
    print(f"SAM     {train(steppe.sam(0.2), epochs):.2f} %  (two gradients a step)")
    print(f"m-ARWP  {train(steppe.m_arwp(ratio=0.9), epochs, accumulate=2):.2f} %  (the same)")


if __name__ == "__main__":
    main()
