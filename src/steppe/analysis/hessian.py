"""The Hessian of a problem as an operator: products with vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from steppe.analysis.directions import length, unflatten
from steppe.analysis.replica import Replica


@dataclass
class Hessian:
    """`v -> H v` for flat float64 vectors; the product itself runs in the model's precision.

    With outputs z(w) and loss l(z), `H v` is the gradient of `l'(z) · (dz/dw v)`.

    - `"tangent"` takes `dz/dw v` forward beside the outputs, then one ordinary backward.
    - `"backward"` differentiates `grad(L) · v` backward: for every model whose gradient can be.
    - `"auto"` becomes `"tangent"` where that agrees with `"backward"` on the first micro-batch, else
      `"backward"`: softmax inside a model (torch raises), BatchNorm with batch statistics (torch's
      derivative is wrong without an error).
    """

    replica: Replica
    mode: Literal["auto", "tangent", "backward"] = "auto"
    count: int = field(default=0, init=False)

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
        replica = self.replica
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
        return [s.div_(count) for s in sums]

    def curvature(self, vector: Sequence[Tensor], rows: slice = slice(None)) -> float:
        """`v' H v`."""
        product = self.product(vector, rows)
        return sum((h * v).sum().item() for h, v in zip(product, vector, strict=True))

    def _of_batch(self, x: Tensor, y: Tensor, vector: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.mode == "tangent":
            return _tangent(self.replica, x, y, vector)
        products = _double_backward(self.replica, x, y, vector)
        if self.mode == "auto":
            self.mode = "backward"
            try:
                tangents = _tangent(self.replica, x, y, vector)
            except (RuntimeError, TypeError):
                return products
            apart = length([p - q for p, q in zip(tangents, products, strict=True)])
            if apart <= 1e3 * self.eps * (length(products) or 1.0):
                self.mode, products = "tangent", tangents
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


def _gradient(outputs: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradient of the sum of outputs; what does not depend on the weights has no share."""
    curved = [output for output in outputs if output.grad_fn is not None]
    if not curved:
        return [torch.zeros_like(p) for p in params]
    return torch.autograd.grad(curved, params, materialize_grads=True)
