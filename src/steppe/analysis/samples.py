"""Samples under analysis: one pair of tensors, from whatever holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def as_samples(data: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """All samples as `(x, y)`, of a pair of tensors or arrays, a dataset or a DataLoader.

    Tensors stay as they are. Floats of arrays and of samples become `dtype`: numpy's and Python's are
    float64, which nobody chose.

    Examples:
        >>> x, y = as_samples(TensorDataset(torch.eye(3), torch.arange(3)))
        >>> x.shape, y.tolist()
        (torch.Size([3, 3]), [0, 1, 2])
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_array, data)):
        x, y = (p if isinstance(p, Tensor) else _of_type(torch.as_tensor(p), dtype) for p in data)
    else:
        x, y = (_of_type(part, dtype) for part in _gathered(data))
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"x and y must hold the same number of samples, at least one; got shapes "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )
    return x, y


def _of_type(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if values.is_floating_point() else values


def _is_array(part: Any) -> bool:
    return isinstance(part, Tensor) or hasattr(part, "__array__")


def _gathered(data: Any) -> tuple[Tensor, Tensor]:
    """The batches of a loader, or the samples of a dataset, put together."""
    kind = type(data).__name__
    pairs: list[tuple[Tensor, Tensor]] = []
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    plain = isinstance(data, tuple | list | dict | str)
    if isinstance(data, DataLoader | IterableDataset) or (indexed and not plain):
        alone = torch.Generator()  # else a loader draws from the global one
        batches = data if isinstance(data, DataLoader) else DataLoader(data, generator=alone)
        pairs = [(*(b if isinstance(b, tuple | list) else [b]), None)[:2] for b in batches]
        if not pairs:
            raise ValueError(f"x and y must hold at least one sample; the {kind} is empty.")
    if not pairs or not all(isinstance(part, Tensor) for pair in pairs for part in pair):
        raise TypeError(
            "data must be a pair of tensors or arrays (x, y), a dataset or a DataLoader that gives such "
            f"pairs, got {kind}."
        )
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
