"""ARWP in the manner of the authors' released scripts, written anew from its description.

Per-tensor loops; each filter's norm repeated to the full size of the weights; a gradient history as
large as the weights; a clone of every parameter as backup; `.item()` for the norm of each vector. It is
here to be measured against, not to be used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ReleasedARWP:
    """perturb(), forward and backward, restore(), then the optimizer's step."""

    def __init__(
        self, model: nn.Module, sigma: float, eta: float = 0.1, beta: float = 0.99
    ) -> None:
        self.model, self.sigma, self.eta, self.beta = model, sigma, eta, beta
        self.history: dict[nn.Parameter, Tensor] = {}
        self.backup: dict[nn.Parameter, Tensor] = {}

    def perturb(self) -> None:
        self.backup = {p: p.data.clone() for p in self.model.parameters()}
        for param in self.model.parameters():
            if param.dim() > 1:
                inner = tuple(range(1, param.dim()))
                norm = torch.linalg.vector_norm(param.data, dim=inner, keepdim=True)
                size = norm.repeat(1, *param.shape[1:])
            else:
                size = torch.full_like(param.data, param.data.norm().item() + 1e-16)
            std = self.sigma * size
            if param in self.history:
                std = std / torch.sqrt(1 + self.eta * self.history[param])
            param.data.add_(torch.normal(0.0, std))

    def restore(self) -> None:
        for param, value in self.backup.items():
            param.data = value
        for param in self.model.parameters():
            if param.grad is None:
                continue
            squares = param.grad.data**2
            if param.dim() > 1:
                inner = tuple(range(1, param.dim()))
                squares = squares.sum(dim=inner, keepdim=True).repeat(1, *param.shape[1:])
            old = self.history.get(param)
            self.history[param] = squares if old is None else self.beta * old + squares
