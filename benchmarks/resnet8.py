"""The network that the analyses are measured on: a ResNet-8 of about 76 k weights, trained a little."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            self.short = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.short(x))


def resnet8() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def trained(steps: int, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A net that has learned which of ten smooth patterns lies under the noise of an image."""
    torch.manual_seed(0)
    model = resnet8()
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
