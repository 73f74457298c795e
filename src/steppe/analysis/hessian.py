"""The Hessian of a problem as an operator: products with vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from steppe.analysis.directions import length, unflatten
from steppe.analysis.replica import Replica

ProductMode = Literal["auto", "tangent", "backward", "jvp"]


@dataclass
class Hessian:
    """`v -> H v` for flat float64 vectors; the product itself runs in the model's precision.

    With outputs z(w) and loss l(z), `H v` is the gradient of `l'(z) · (dz/dw v)`.

    - `"tangent"` takes `dz/dw v` forward beside the outputs, then one ordinary backward.
    - `"backward"` differentiates `grad(L) · v` backward: for every model whose gradient can be.
    - `"jvp"` differentiates the gradient forward along v.
    - `"auto"` is `"tangent"` where that agrees with `"backward"` on the first micro-batch, else
      `"backward"`: softmax inside a model (torch raises), BatchNorm with batch statistics (torch's
      derivative is wrong without an error).
    """

    replica: Replica
    mode: ProductMode = "auto"
    count: int = field(default=0, init=False)
    _checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(ProductMode):
            raise ValueError(f"mode must be one of {get_args(ProductMode)}, got {self.mode!r}.")

    @property
    def size(self) -> int:
        return self.replica.problem.size

    @property
    def eps(self) -> float:
        """The relative precision of a product."""
        return torch.finfo(self.replica.dtype).eps

    def __call__(self, vector: Tensor) -> Tensor:
        parts = unflatten(vector, self.replica.params)
        return torch.cat([h.reshape(-1) for h in self.product(parts)]).cpu()

    def product(self, vector: Sequence[Tensor], rows: slice = slice(None)) -> list[Tensor]:
        """`H v` at the present weights as float64 tensors, one for each parameter."""
        self.count += 1
        replica, wd = self.replica, self.replica.problem.weight_decay
        replica.refresh_statistics()
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in replica.params]
        count = 0
        for x, y in replica.batches(rows):
            # The fused attention kernels have no second derivative.
            with sdpa_kernel(SDPBackend.MATH):
                products = self._of_batch(x, y, vector)
            for s, h in zip(sums, products, strict=True):
                s.add_(h, alpha=len(x))
            count += len(x)
        return [s.div_(count).add_(v, alpha=wd) for s, v in zip(sums, vector, strict=True)]

    def curvature(self, vector: Sequence[Tensor], rows: slice = slice(None)) -> float:
        """`v' H v`."""
        product = self.product(vector, rows)
        return sum((h * v).sum().item() for h, v in zip(product, vector, strict=True))

    def _of_batch(self, x: Tensor, y: Tensor, vector: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.mode in ("auto", "tangent") and not self._checked:
            return self._first_of_batch(x, y, vector)
        ways = {"tangent": _tangent, "backward": _double_backward, "jvp": _forward_over_backward}
        return ways[self.mode](self.replica, x, y, vector)

    def _first_of_batch(self, x: Tensor, y: Tensor, vector: Sequence[Tensor]) -> Sequence[Tensor]:
        """The first product, both ways: some operations have wrong forward derivatives."""
        products = _double_backward(self.replica, x, y, vector)
        try:
            tangents = _tangent(self.replica, x, y, vector)
            apart = length([p - q for p, q in zip(tangents, products, strict=True)])
            off = apart / (length(products) or 1.0)
            if off > 1e3 * self.eps:
                raise RuntimeError(
                    f"The forward derivatives of this model are off by {off:.2g}, relative to "
                    'double backward. Use mode="backward".'
                )
        except (RuntimeError, TypeError):
            if self.mode == "tangent":
                raise
            self.mode = "backward"
        else:
            self.mode, products = "tangent", tangents
        self._checked = True
        return products


def _tangent(replica: Replica, x: Tensor, y: Tensor, vector: Sequence[Tensor]) -> Sequence[Tensor]:
    names, params = replica.problem.names, replica.params
    with forward_ad.dual_level():
        pairs = zip(names, params, vector, strict=True)
        duals = {name: forward_ad.make_dual(p, v) for name, p, v in pairs}
        moved = torch.func.functional_call(replica.model, duals, (x,))
        output, tangent = forward_ad.unpack_dual(moved)
        if tangent is None:
            return [torch.zeros_like(p) for p in params]
    # The loss itself by double backward: forward derivatives of torch's cross-entropy cannot be
    # differentiated backward (it overwrites an exponential that it needs).
    loss = replica.problem.loss(output, y)
    (slope,) = torch.autograd.grad(loss, output, create_graph=True)
    return _gradient([(slope * tangent).sum()], params)


def _double_backward(
    replica: Replica, x: Tensor, y: Tensor, vector: Sequence[Tensor]
) -> Sequence[Tensor]:
    loss = replica.problem.loss(replica.model(x), y)
    grads = torch.autograd.grad(loss, replica.params, create_graph=True, allow_unused=True)
    pairs = zip(grads, vector, strict=True)
    return _gradient([(g * v).sum() for g, v in pairs if g is not None], replica.params)


def _forward_over_backward(
    replica: Replica, x: Tensor, y: Tensor, vector: Sequence[Tensor]
) -> Sequence[Tensor]:
    names = replica.problem.names

    def loss(*weights: Tensor) -> Tensor:
        moved = dict(zip(names, weights, strict=True))
        return replica.problem.loss(torch.func.functional_call(replica.model, moved, (x,)), y)

    gradient = torch.func.grad(loss, argnums=tuple(range(len(names))))
    at = tuple(p.detach() for p in replica.params)
    products: Sequence[Tensor] = torch.func.jvp(gradient, at, tuple(vector))[1]
    return products


def _gradient(outputs: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradient of the sum of outputs; what does not depend on the weights has no share."""
    curved = [output for output in outputs if output.grad_fn is not None]
    if not curved:
        return [torch.zeros_like(p) for p in params]
    return torch.autograd.grad(curved, params, allow_unused=True, materialize_grads=True)
