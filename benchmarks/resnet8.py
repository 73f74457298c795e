"""The network that the analyses are measured on: a ResNet-8 of about 76 k weights, trained a little."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steppe.lab.models.resnet import ResNet


def trained(steps: int, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A net that has learned which of ten smooth patterns lies under the noise of an image."""
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
