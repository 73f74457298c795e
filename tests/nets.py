"""Small models and batches that the tests share."""

import torch
from torch import nn


def mlp(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def conv(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
    )


def batch(step=0, size=16, features=(6,), classes=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, *features, generator=generator).to(dtype)
    return x, torch.randint(0, classes, (size,), generator=generator)


def images(step=0, size=16):
    return batch(step, size, (3, 8, 8), 4)


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


loss_fn = nn.functional.cross_entropy


class Dropping(nn.Module):
    """BatchNorm and dropout: buffers and the random state matter on resume."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 10)
        )

    def forward(self, x):
        return self.net(x)
