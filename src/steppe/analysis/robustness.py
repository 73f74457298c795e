"""Robustness: what is left of a model after rounding, pruning, weight noise or worse inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from steppe.analysis.calibration import calibration_error
from steppe.analysis.changes import (
    Blur,
    Change,
    Contrast,
    InputNoise,
    Pruning,
    Rounding,
    TwoOfFour,
    WeightNoise,
    input_scale,
)
from steppe.analysis.problem import Problem, check_problem
from steppe.analysis.progress import Progress
from steppe.analysis.replica import Replica
from steppe.analysis.robustness_result import METRICS, Robustness
from steppe.batchnorm import batch_size, recompute_norm_stats, tracked_norms
from steppe.noise import Draw, check_seed
from steppe.schedules import check_number

Included = Literal["matrices", "all"]
ON_WEIGHTS: tuple[Change, ...] = (
    *(Rounding(bits, per) for per in ("filter", "tensor") for bits in (8, 6, 4, 3, 2)),
    *(Pruning(amount, scope) for scope in ("tensor", "global") for amount in (0.3, 0.5, 0.7, 0.8, 0.9)),
    TwoOfFour(),
    *(WeightNoise(ratio) for ratio in (0.05, 0.1, 0.2, 0.3, 0.5)),
)  # fmt: skip
ON_INPUTS: tuple[Change, ...] = tuple(InputNoise(level) for level in (0.25, 0.5, 1.0))
ON_IMAGES: tuple[Change, ...] = (
    *(Blur(pixels) for pixels in (0.5, 1.0, 2.0)),
    *(Contrast(factor) for factor in (0.6, 0.4, 0.2)),
)


def robustness(
    problem: Problem,
    changes: Sequence[Change] | None = None,
    *,
    recalibrate: Iterable[Any] | None = None,
    recalibration_samples: int = 1024,
    include: Included = "matrices",
    draws: int = 4,
    seed: int = 0,
    progress: bool | None = None,
) -> Robustness:
    """Accuracy, loss and calibration error after each change, beside those of the unchanged model.

    By default: weights rounded to 8 to 2 bits, 30 to 90 % of them pruned, 2:4, weight noise;
    noise on inputs that are real numbers; blur and contrast of images (`standard_changes`).

    - Changed are tensors of two or more dimensions, without embeddings, tokens and positions;
      `include="all"` takes every parameter under analysis.
    - `recalibrate`: batches of the *training* pipeline, augmentation included (inputs, or tuples that
      begin with them). BatchNorm's statistics are recomputed from the first `recalibration_samples`
      after each change, and every number is there twice: as is, and recalibrated.
    - Random changes are drawn `draws` times, each draw with both signs.

    Examples:
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.1], [0.1, 1.0]]))
        >>> problem = Problem(model, torch.nn.functional.cross_entropy,
        ...                   (torch.eye(2), torch.arange(2)))
        >>> robustness(problem, [Rounding(2), Pruning(1.0)]).accuracy
        tensor([[1.0000, 1.0000, 0.5000]], dtype=torch.float64)
    """
    check_problem(problem)
    if isinstance(changes, Change):
        raise TypeError(f"changes must be a list such as [Rounding(4)], got {changes}.")
    chosen = (Change(), *(standard_changes(problem) if changes is None else changes))
    _check(problem, chosen, include)
    check_number("draws", draws, whole=True)
    check_number("recalibration_samples", recalibration_samples, whole=True)
    check_seed(seed)
    counts = tuple(2 * draws if change.random else 1 for change in chosen)
    plan = [(c, number) for c, count in enumerate(counts) for number in range(count)]
    batches = [] if recalibrate is None else _first(recalibrate, recalibration_samples)
    with problem.replica() as replica:
        bench = _Bench(replica, _changed_names(problem, include), batches, seed)
        settings: dict[str, Any] = {
            "kinds": tuple(change.kind for change in chosen),
            "schemes": tuple(change.scheme for change in chosen),
            "sizes": tuple(change.size for change in chosen),
            "counts": counts,
            "statistics": bench.statistics,
            "recalibration_samples": bench.recalibration,
            "norms": bench.norms,
            "changed": bench.names,
            "include": include,
            "draws": draws,
            "seed": seed,
            "origin": problem.describe(),
        }
        # Forwards over all samples for each line of the plan.
        each = 2 + bench.recalibration / problem.samples if bench.recalibration else 1
        bar = Progress("robustness", round(len(plan) * each), progress)
        rows = bar.rows(plan, lambda line: bench.measure(chosen[line[0]], line[1]), problem)
    shape = (len(METRICS), rows.shape[1], len(chosen), 2 * draws)
    values = torch.full(shape, torch.nan, dtype=torch.float64)
    for (change, number), measured in zip(plan, rows, strict=True):
        values[:, :, change, number] = measured.T
    return Robustness(values=values, **settings)


def standard_changes(problem: Problem) -> tuple[Change, ...]:
    """All changes that make sense for the problem's data."""
    x = problem.data[0]
    of_inputs = ON_INPUTS if x.is_floating_point() else ()
    return ON_WEIGHTS + of_inputs + (ON_IMAGES if _are_images(x) else ())


class _Bench:
    """A replica whose weights, statistics and inputs are changed and measured, one change a time."""

    def __init__(
        self, replica: Replica, names: Sequence[str], batches: Sequence[Any], seed: int
    ) -> None:
        self.replica, self.names, self.seed = replica, tuple(names), seed
        self._places = [replica.problem.names.index(name) for name in names]
        x = replica.problem.data[0]
        real = x.is_floating_point()
        self._scale = (input_scale(x) if real else torch.ones(())).to(replica.device)
        self._kept = [(buffer, buffer.clone()) for buffer in replica.model.buffers()]
        self.norms = len(tracked_norms(replica.model))
        self.batches = [pytree.tree_map(self._placed, batch) for batch in batches if self.norms]
        if batches:
            self._try_recalibrating()
        self.recalibration = sum(map(batch_size, self.batches))
        as_is = "batch" if replica.norms and replica.problem.bn == "batch" else "as is"
        self.statistics = (as_is, "recalibrated") if self.batches else (as_is,)

    def _try_recalibrating(self) -> None:
        """Say what keeps it from working before anything is measured."""
        if not self.norms:
            why = 'bn="batch" uses none' if self.replica.norms else "the model has none"
            said = f"recalibrate= does nothing: it recomputes stored statistics, and {why}."
            return warnings.warn(said, stacklevel=4)
        try:
            recompute_norm_stats(self.replica.model, self.batches[:1])
        except Exception as error:
            raise ValueError(
                f"recalibrate: the model cannot run its first batch ({type(error).__name__}: {error}). "
                "A batch is an input, a tuple that begins with one, or a dict of the forward's arguments."
            ) from error

    def measure(self, change: Change, number: int) -> Tensor:
        """(loss, accuracy, calibration error) for each way of BatchNorm's statistics."""
        draw = Draw(self.seed, number // 2, sign=-1.0 if number % 2 else 1.0)
        replica = self.replica
        weights = list(replica.centre)
        changed = change.weights([weights[place] for place in self._places], draw)
        for place, tensor in zip(self._places, changed, strict=True):
            weights[place] = tensor
        replica.place(weights)
        for buffer, kept in self._kept:
            buffer.copy_(kept)
        rows = [self._metrics(change, draw)]
        if self.batches:
            recompute_norm_stats(replica.model, self.batches)
            rows.append(self._metrics(change, draw))
        return torch.tensor(rows, dtype=torch.float64)

    def _metrics(self, change: Change, draw: Draw) -> tuple[float, float, float]:
        seen: list[tuple[Tensor, Tensor]] = []

        def look(output: Any, y: Tensor) -> None:
            if isinstance(output, Tensor) and output.ndim > 1 and output.shape[1] > 1:
                confidence, guess = output.double().softmax(1).max(1)
                if guess.shape == y.shape:
                    counts = y >= 0
                    seen.append((confidence[counts].cpu(), (guess == y)[counts].cpu()))

        loss, accuracy = self.replica.evaluate(
            alter=lambda x, first: change.inputs(x, first, self._scale, draw), look=look
        )
        if accuracy is None or not seen:
            return loss, torch.nan, torch.nan
        confidence, correct = (torch.cat(parts) for parts in zip(*seen, strict=True))
        return loss, accuracy, calibration_error(confidence, correct)

    def _placed(self, leaf: Any) -> Any:
        return self.replica.as_input(leaf) if isinstance(leaf, Tensor) else leaf


def changed_weights(model: nn.Module, include: Included = "matrices") -> list[str]:
    """The names of the parameters that rounding, pruning and noise change.

    Of two or more dimensions, and neither an embedding's nor called token, position or embedding
    by the model that owns it; with `"all"`, every one.
    """
    if include == "all":
        return [name for name, _ in model.named_parameters()]
    embeddings = {
        id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    }
    return [
        name
        for name, p in model.named_parameters()
        if p.ndim > 1
        and id(p) not in embeddings
        and not any(word in name.rpartition(".")[2] for word in ("embed", "token", "position"))
    ]


def _changed_names(problem: Problem, include: Included) -> list[str]:
    names = [name for name in changed_weights(problem.model, include) if name in problem.names]
    if not names:
        raise ValueError(
            "The problem has no weights to change: no tensor of two or more dimensions apart from "
            'embeddings. include="all" takes every parameter.'
        )
    return names


def _first(batches: Iterable[Any], samples: int) -> list[Any]:
    """As many batches as hold so many samples."""
    if (single := isinstance(batches, Tensor | Dataset)) or not isinstance(batches, Iterable):
        got = f"{type(batches).__name__}{' of single samples' * single}"
        raise TypeError(
            f"recalibrate takes batches, got a {got}. Give it a DataLoader, or tensor.split(64)."
        )
    found: list[Any] = []
    for batch in batches:
        found.append(batch)
        if sum(map(batch_size, found)) >= samples:
            break
    if not found:
        raise ValueError("recalibrate holds no batches: give it those of the training pipeline.")
    return found


def _are_images(x: Tensor) -> bool:
    return x.is_floating_point() and x.ndim == 4 and min(x.shape[2:]) > 3


def _check(problem: Problem, changes: Sequence[Change], include: str) -> None:
    if problem.bn == "recalibrate":
        raise ValueError(
            'robustness() does not take bn="recalibrate": statistics of the samples under analysis '
            'are not those of training. Use bn="eval" and give it training batches: '
            "robustness(problem, recalibrate=train_loader)."
        )
    if include not in ("matrices", "all"):
        raise ValueError(f'include must be "matrices" or "all", got {include!r}.')
    x = problem.data[0]
    for change in changes:
        if not isinstance(change, Change):
            raise TypeError(f"changes must be such as Rounding(4) or Pruning(0.5), got {change!r}.")
        for kinds, fits, wanted in (
            (Blur | Contrast, _are_images(x), "images (n, channels, height, width)"),
            (InputNoise, x.is_floating_point(), "inputs of real numbers"),
        ):
            if isinstance(change, kinds) and not fits:
                got = f"x of shape {tuple(x.shape)} ({x.dtype})"
                raise ValueError(f"{change} needs {wanted}, got {got}. Leave it out.")
