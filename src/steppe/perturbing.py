"""`perturbed`: a model under weight noise for as long as a block runs, with no optimizer at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import nn

from steppe.attaching import check_seed, parameter_names, warn_unmatched
from steppe.layout import Shards, sharding
from steppe.noise import Draw
from steppe.weights import Weights


@contextmanager
def perturbed(
    model: nn.Module, *, seed: int, ratio: float, exclude: Sequence[str] = ()
) -> Iterator[None]:
    """The model's weights plus Gaussian noise inside the block, the true weights after it.

    For weight-noise evaluation, evolution strategies and parameter-noise exploration. Each filter is
    displaced by about `ratio` times its norm, `std_j = ratio ‖w_j‖ / sqrt(d_j)`, as `rwp(ratio=…)`
    does; a negative `ratio` gives the same noise with the opposite sign, for antithetic pairs.

    - The noise is a function of `seed` and of the parameters' shapes and memory format, independent for
      each tensor, and the same on every rank and for any sharding. The global generator is not used.
    - Every floating-point parameter is perturbed, also a frozen one; `exclude` takes names to leave
      out, for example `("*.bias", "*norm*")`.
    - Every exit restores the weights bit-exactly, exceptions and Ctrl-C included. Nothing else is
      restored: call `model.eval()` first, or BatchNorm's statistics learn from perturbed forwards.
    - While weights are perturbed, by this or by a perturber, a second perturbation of them is refused.
      Under FSDP2 all ranks enter the block together.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> losses = []
        >>> for seed in range(3):
        ...     with perturbed(model, seed=seed, ratio=0.1):
        ...         losses.append(model(torch.ones(1, 2)).item())
        >>> len(set(losses)), model.weight.tolist()
        (3, [[3.0, 4.0]])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    check_seed(seed)
    if not (isinstance(ratio, int | float) and math.isfinite(ratio)):
        raise ValueError(f"ratio must be a finite number, got {ratio!r}.")
    for module in sharding(model):  # gathered tensors may be in the parameters' place
        module.reshard()
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    names = parameter_names(model)
    warn_unmatched(patterns, names)
    chosen = [
        (known[0], param)
        for param, known in names.items()
        if param.is_floating_point()
        and not any(fnmatchcase(name, pattern) for name in known for pattern in patterns)
    ]
    if not chosen:
        raise ValueError("Nothing is left to perturb: the model has no floating-point parameter.")
    weights = Weights(chosen, None, Shards(model))
    draw = Draw(int(seed), 0, sign=math.copysign(1.0, ratio))
    try:
        if ratio != 0:
            weights.save()
            weights.add_noise(draw, abs(ratio) * weights.norms_per_entry())
            weights.watch()
            torch.clear_autocast_cache()
        yield
    except BaseException:
        weights.restore(quiet=True)
        raise
    finally:
        torch.clear_autocast_cache()
        weights.free()
