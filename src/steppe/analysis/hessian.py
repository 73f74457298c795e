"""The Hessian of a problem as an operator on flat vectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from steppe.analysis.replica import Replica

ProductMode = Literal["backward", "jvp"]


@dataclass
class Hessian:
    """`v -> H v` for flat float64 vectors; the product itself runs in the model's precision.

    `mode="backward"` differentiates `grad(L)·v` backward once more; `"jvp"` differentiates the
    gradient forward along v.

    >>> from steppe.analysis import Problem
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> data = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.zeros(2, 1).double()
    >>> problem = Problem(model, lambda out, y: (out - y).square().mean() / 2, data)
    >>> with problem.replica() as replica:
    ...     Hessian(replica)(torch.tensor([1.0, 1.0]).double())
    tensor([2.0000, 0.5000], dtype=torch.float64)
    """

    replica: Replica
    mode: ProductMode = "backward"
    count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(ProductMode):
            raise ValueError(f'mode must be "backward" or "jvp", got {self.mode!r}.')

    @property
    def size(self) -> int:
        return self.replica.problem.size

    @property
    def eps(self) -> float:
        """The relative precision of a product."""
        return torch.finfo(self.replica.dtype).eps

    def __call__(self, vector: Tensor) -> Tensor:
        self.count += 1
        parts = unflatten(vector, self.replica.params)
        product = self.replica.product if self.mode == "backward" else self.replica.forward_product
        return torch.cat([h.reshape(-1) for h in product(parts)]).cpu()


def unflatten(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The pieces of a flat vector in the shapes, types and devices of these tensors."""
    pieces = torch.split(vector, [t.numel() for t in like])
    return [piece.reshape(t.shape).to(t) for piece, t in zip(pieces, like, strict=True)]
