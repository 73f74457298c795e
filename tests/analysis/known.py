"""Problems whose answers are known: quadratics with chosen eigenvalues, small nets in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steppe.analysis import Problem


class Quadratic(nn.Module):
    """`w'Hw/2` for every sample."""

    def __init__(self, H: Tensor, at: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("H", H)
        self.w = nn.Parameter(torch.zeros(len(H), dtype=H.dtype) if at is None else at.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (0.5 * self.w @ self.H @ self.w).expand(len(x))


def rotated(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A dense symmetric matrix with these eigenvalues: coordinates give nothing away."""
    n = len(eigenvalues)
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    H = Q @ torch.diag(eigenvalues.double()) @ Q.T
    return (H + H.T) / 2


def quadratic(H: Tensor, at: Tensor | None = None, **options: object) -> Problem:
    data = torch.zeros(3, 1, dtype=H.dtype), torch.zeros(3)
    return Problem(Quadratic(H, at), lambda out, y: out.mean(), data, **options)


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm, smooth so that its Hessian exists everywhere."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1, bias=False),
            nn.BatchNorm2d(3),
            nn.Tanh(),
            nn.Conv2d(3, 4, 3, stride=2, bias=True),
            nn.BatchNorm2d(4),
            nn.Tanh(),
        )
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class AttentionNet(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return self.head(mixed.mean(1))


def settled_net(kind: str, seed: int = 0, samples: int = 13) -> tuple[nn.Module, tuple]:
    """A float64 net with BatchNorm statistics and weights away from their initial values."""
    torch.manual_seed(seed)
    model: nn.Module
    if kind == "conv":
        model, x = ConvNet().double(), torch.randn(samples, 1, 6, 6).double()
    else:
        model, x = AttentionNet().double(), torch.randn(samples, 5, 3).double()
    y = torch.randint(3, (samples,))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval(), (x, y)


def full_hessian(problem: Problem) -> Tensor:
    """All second derivatives by torch.func on the model itself, samples in one batch."""
    names = problem.names
    parameters = dict(problem.model.named_parameters())
    shapes = [parameters[name].shape for name in names]
    flat = torch.cat([parameters[name].detach().reshape(-1) for name in names])

    def loss(w: Tensor) -> Tensor:
        parts = w.split([shape.numel() for shape in shapes])
        moved = {n: p.reshape(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        x, y = problem.data
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = torch.func.functional_call(problem.model, moved, (x,))
        return problem.loss(out, y)

    return torch.autograd.functional.hessian(loss, flat, vectorize=True)
