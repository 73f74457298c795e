"""Lanczos on a symmetric operator, with full reorthogonalisation, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

Operator = Callable[[Tensor], Tensor]


@dataclass
class Krylov:
    """An orthonormal basis (rows) that grows by one product a step, and `T = V' A V`.

    `A V = V T + beta_m v_(m+1) e_m'` up to rounding. `eps` is the relative precision of a product:
    a remainder below it is noise, the space is invariant, and the recurrence continues from a fresh
    random vector with `beta = 0`. Everything stays orthogonal to `locked` (rows).
    """

    size: int
    eps: float
    seed: int = 0
    locked: tuple[Tensor, ...] = ()
    alpha: list[float] = field(default_factory=list, init=False)
    beta: list[float] = field(default_factory=list, init=False)
    basis: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.basis.append(self._fresh())

    def __len__(self) -> int:
        return len(self.alpha)

    @property
    def exhausted(self) -> bool:
        """Whether it spans all of the space."""
        return len(self) >= self.size - len(self.locked)

    @property
    def scale(self) -> float:
        """A lower estimate of the operator's norm."""
        return max((abs(v) for v in (*self.alpha, *self.beta)), default=0.0)

    @property
    def broken(self) -> bool:
        """Whether the last step found an invariant space."""
        return len(self) > 0 and self.beta[-1] == 0.0

    def step(self, operator: Operator) -> None:
        """One product more."""
        v = self.basis[len(self)]
        w = operator(v)
        if not torch.isfinite(w).all():
            raise ValueError(
                "A Hessian product is not finite. Check that the loss and its gradient are finite "
                "at these weights, and that the loss can be differentiated twice."
            )
        self.alpha.append(torch.dot(v, w).item())
        w = self._orthogonal(w)
        beta = w.norm().item()
        if beta <= 10 * self.eps * self.scale:
            beta = 0.0
        self.beta.append(beta)
        if not self.exhausted:
            self.basis.append(w / beta if beta else self._fresh())

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values (ascending), the eigenvectors of T (columns), and the residual bounds.

        The bound of value i is `beta_m |s_mi|`: some eigenvalue lies no farther away.
        """
        values, vectors = map(torch.from_numpy, eigh_tridiagonal(self.alpha, self.beta[:-1]))
        last = 0.0 if self.exhausted else self.beta[-1]
        return values, vectors, (last * vectors[-1]).abs()

    def combine(self, coefficients: Tensor) -> Tensor:
        """`V s`, normalised."""
        out = torch.zeros(self.size, dtype=torch.float64)
        for row, coefficient in zip(self.basis, coefficients.tolist(), strict=False):
            out.add_(row, alpha=coefficient)
        return out.div_(out.norm())

    def _orthogonal(self, w: Tensor) -> Tensor:
        # Twice is enough (Kahan, Parlett): once loses digits when most of w is cancelled.
        for _ in range(2):
            for row in (*self.locked, *self.basis):
                w.sub_(row, alpha=torch.dot(row, w).item())
        return w

    def _fresh(self) -> Tensor:
        """A random unit vector orthogonal to all there is; a function of seed and position."""
        # The CPU generator reads 32 bits of a seed: mix, or many seeds would be one.
        mixed = (self.seed * 0x9E3779B1 + len(self.basis) * 0x85EBCA6B) % 2**32
        generator = torch.Generator().manual_seed(mixed)
        w = self._orthogonal(torch.randn(self.size, dtype=torch.float64, generator=generator))
        return w.div_(w.norm())
