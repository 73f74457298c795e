"""The problem under analysis: a model, a loss and a fixed subset of data."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from steppe.analysis.replica import Replica
from steppe.schedules import check_number

BatchNormMode = Literal["eval", "batch", "recalibrate"]
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """The loss `L(w) = mean_i loss(model_w(x_i), y_i)` on fixed samples.

    - `loss(output, target)` gives the mean over the samples of one batch. The analyses work on
      private copies of the model, with the weights that it has when they start.
    - `data` is a pair of tensors or arrays `(x, y)`, or a dataset or DataLoader of such pairs, which is
      loaded as a whole. For a part of a dataset, `torch.utils.data.Subset`.
    - `bn` says which statistics BatchNorm uses: `"eval"` the stored ones; `"batch"` those of each
      micro-batch, which derivatives pass through; `"recalibrate"` those of the whole subset,
      recomputed wherever the weights are moved and constant for derivatives.
    - `params` restricts the analysis to some parameters: names or patterns such as `"layer1.*"`. By
      default, all that require gradients.

    Examples:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> half_squares = lambda out, y: (out - y).square().mean() / 2
        >>> Problem(model, half_squares, (torch.eye(2), torch.zeros(2, 1))).value()
        6.25
    """

    model: nn.Module
    loss: Loss
    data: Any
    bn: BatchNormMode = "eval"
    params: Iterable[str] | None = None
    microbatch: int = 64
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.bn not in get_args(BatchNormMode):
            raise ValueError(f'bn must be "eval", "batch" or "recalibrate", got {self.bn!r}.')
        check_number("microbatch", self.microbatch, whole=True)
        _check_kinds(self.model, self.loss)
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        object.__setattr__(self, "data", _as_samples(self.data, dtype))
        if self.params is not None:
            # Kept as a tuple: a generator would be empty the second time it is read.
            chosen = (self.params,) if isinstance(self.params, str) else self.params
            object.__setattr__(self, "params", tuple(chosen))
        object.__setattr__(self, "names", tuple(_chosen_names(self.model, self.params)))
        self._check_fit()

    def __repr__(self) -> str:
        model, loss = type(self.model).__name__, getattr(self.loss, "__name__", self.loss)
        x, _ = self.data
        return (
            f"<Problem: {model}, {self.size} of its weights, {loss} on {self.samples} samples of "
            f"shape {tuple(x.shape[1:])}, BatchNorm {self.bn}>"
        )

    @property
    def samples(self) -> int:
        return len(self.data[0])

    @property
    def size(self) -> int:
        """The number of weights under analysis."""
        parameters = dict(self.model.named_parameters())
        return sum(parameters[name].numel() for name in self.names)

    @contextmanager
    def replica(self) -> Iterator[Replica]:
        """A private copy to work on; whatever it draws, the global random state stays."""
        device = next(self.model.parameters()).device
        cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            yield Replica(self)

    def value(self) -> float:
        """The loss at the model's weights."""
        with self.replica() as replica:
            return replica.evaluate()[0]

    def describe(self) -> dict[str, Any]:
        """What a result needs to say about where it comes from."""
        return {
            "samples": self.samples,
            "data_hash": digest(self.data),
            "weights_hash": digest(p for _, p in self.model.named_parameters()),
            "bn": self.bn,
            "parameters": self.size,
            "params": list(self.names) if self.params is not None else None,
            "microbatch": self.microbatch,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "torch": torch.__version__,
        }

    def _check_fit(self) -> None:
        """Run two samples through, so that a misfit is reported here and not hours later."""
        x, y = (tensor[:2] for tensor in self.data)
        with self.replica() as replica, torch.no_grad():
            try:
                output = replica.model(replica.as_input(x))
                loss = self.loss(output, y.to(replica.device))
            except Exception as error:
                raise ValueError(
                    f"The model and the data do not fit: x of shape {tuple(x.shape)} ({x.dtype}), "
                    f"y of shape {tuple(y.shape)} ({y.dtype}) raised "
                    f"{type(error).__name__}: {error}"
                ) from error
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(
                    f"loss must give one number, the mean over the samples; got {shape}. "
                    'With torch losses, use reduction="mean".'
                )
            _check_mean(self.loss, output, y.to(replica.device), loss)


def check_problem(problem: object) -> None:
    """Refuse what is not a problem, as every analysis does first."""
    if not isinstance(problem, Problem):
        raise TypeError(
            "An analysis takes a Problem: Problem(model, loss, (x, y)). Got "
            f"{type(problem).__name__}."
        )


def _check_kinds(model: object, loss: object) -> None:
    if not isinstance(model, nn.Module):
        hint = " Call what makes it first." if callable(model) else ""
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.{hint}")
    if isinstance(loss, type) or not callable(loss):
        got = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
        raise TypeError(
            "loss must be a function of outputs and targets, such as F.cross_entropy or "
            f"nn.CrossEntropyLoss(); got {got}."
        )


def _check_mean(loss: Loss, output: Any, y: Tensor, value: Tensor) -> None:
    """Samples given twice must not change a mean; a sum would double without an error."""
    if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != len(y):
        return
    twice = loss(torch.cat([output, output]), torch.cat([y, y]))
    if torch.isfinite(value) and not torch.allclose(twice, value, rtol=1e-3, atol=1e-30):
        raise ValueError(
            f"loss must be the mean over the samples, but giving each sample twice changed it "
            f'from {value.item():.6g} to {twice.item():.6g}. With torch losses, use reduction="mean".'
        )


def _chosen_names(model: nn.Module, params: Iterable[str] | None) -> list[str]:
    named = dict(model.named_parameters())
    if params is None:
        names = [name for name, p in named.items() if p.requires_grad]
        if not names:
            raise ValueError(
                f"{type(model).__name__} has no parameter that requires gradients. Name the ones "
                'to analyse: Problem(..., params=["*"]).'
            )
        return names
    chosen: set[str] = set()
    for want in params:
        if not isinstance(want, str):
            raise TypeError(f'params takes names or patterns such as "layer1.*"; got {want!r}.')
        if not (found := fnmatch.filter(named, want)):
            raise ValueError(
                f"params: {want!r} is no parameter of {type(model).__name__}. "
                f"It has: {', '.join(named)}."
            )
        chosen.update(found)
    return [name for name in named if name in chosen]


def digest(tensors: Iterable[Tensor]) -> str:
    """The first 16 hex digits of a hash over values, shapes and types."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def _as_samples(data: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """All samples as `(x, y)`, of a pair of tensors or arrays, a dataset or a DataLoader.

    Tensors stay as they are. Floats of arrays and of samples become `dtype`: numpy's and Python's are
    float64, which nobody chose.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if (
        isinstance(data, tuple | list)
        and len(data) == 2
        and all(hasattr(part, "__array__") for part in data)
    ):
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
