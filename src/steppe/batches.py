"""Batches: what each pass of `perturber.backward` runs on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from steppe.methods import Method


class Work(NamedTuple):
    """The number of a pass to run, the arguments of its loss, and the factor of its gradient."""

    number: int
    arguments: Sequence[Any]
    factor: float


def deal(method: Method, batches: tuple[Any, ...], only: int | None = None) -> list[Work]:
    """Which pass runs on what, in order; raises and says what to pass if the number is wrong.

    `only`: the one pass that this rank runs, where passes are laid over ranks.
    """
    if only is not None:
        if len(batches) > 1:
            raise ValueError(
                f"{method.name}() runs its passes on different ranks, and every rank brings one batch "
                f"of its own; got {len(batches)}. Call perturber.backward(loss_of, batch)."
            )
        weight = method.passes[only].weight * len(method.passes)
        return [Work(only, _arguments(batches[0]) if batches else (), weight)]
    if method.feed == "each":
        if len(batches) != len(method.passes):
            names = ", ".join(f"batch{i + 1}" for i in range(len(method.passes)))
            raise ValueError(
                f"{method.name}() takes a batch for each of its {len(method.passes)} passes, got "
                f"{len(batches)}. Call perturber.backward(loss_of, {names})."
            )
        return [Work(i, _arguments(batches[i]), p.weight) for i, p in enumerate(method.passes)]
    sliced = method.m is not None or method.feed == "slices"
    if len(batches) > 1 or (sliced and not batches):
        raise ValueError(
            f"{method.name}() takes one batch, got {len(batches)}. Call "
            "perturber.backward(loss_of, batch)."
        )
    batch = _arguments(batches[0]) if batches else ()
    if method.feed == "slices":
        parts = slices(batch, len(method.passes))
        return [Work(i, part, share) for i, (part, share) in enumerate(parts)]
    parts = [(batch, 1.0)] if method.m is None else slices(batch, of=method.m)
    return [
        Work(i, part, p.weight * share)
        for part, share in parts
        for i, p in enumerate(method.passes)
    ]


def slices(
    batch: Sequence[Any], parts: int | None = None, *, of: int = 1
) -> list[tuple[Sequence[Any], float]]:
    """The batch along dimension 0 in so many equal `parts`, or in parts `of` so many samples,
    each with its share of the samples.

    Examples:
        >>> import torch
        >>> [(part[0].tolist(), share) for part, share in slices([torch.arange(5)], of=4)]
        [([0, 1, 2, 3], 0.8), ([4], 0.2)]
    """
    size = _batch_size(batch)
    if parts is not None and parts > size:
        raise ValueError(f"A batch of {size} cannot be cut into {parts} slices.")
    if parts is None:
        bounds = [*range(0, size, of), size]
    else:
        bounds = [i * size // parts for i in range(parts + 1)]
    return [
        (
            pytree.tree_map(lambda leaf, a=start, b=stop: _rows(leaf, a, b), list(batch)),
            (stop - start) / size,
        )
        for start, stop in pairwise(bounds)
    ]


def _batch_size(batch: Sequence[Any]) -> int:
    leaves = [leaf for leaf in pytree.tree_leaves(list(batch)) if isinstance(leaf, Tensor)]
    sizes = {leaf.shape[0] for leaf in leaves if leaf.dim()}
    if len(sizes) != 1:
        raise ValueError(
            f"A batch that is sliced must hold tensors of one size along dimension 0, got sizes "
            f"{sorted(sizes)}."
        )
    return int(sizes.pop())


def _rows(leaf: Any, start: int, stop: int) -> Any:
    return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _arguments(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, list | tuple) else (batch,)
