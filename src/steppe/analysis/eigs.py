"""The extreme eigenvalues of the Hessian."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.analysis.hessian import Hessian, ProductMode
from steppe.analysis.lanczos import Krylov
from steppe.analysis.problem import Problem, check_problem
from steppe.analysis.progress import Checkpoint, Progress, Show
from steppe.analysis.results import Result


@dataclass(frozen=True, eq=False, kw_only=True)
class Eigenvalues(Result):
    """The k largest eigenvalues (algebraic, descending), and the smallest if asked for (ascending).

    `residuals` bound `‖H y - value y‖`: an eigenvalue lies no farther from the value than that (see
    `top_eigs`). `products` counts all Hessian products spent.
    """

    values: Tensor
    residuals: Tensor
    smallest: Tensor
    smallest_residuals: Tensor
    converged: bool
    products: int
    tol: float
    seed: int


def top_eigs(
    problem: Problem,
    k: int = 1,
    tol: float = 1e-3,
    *,
    smallest: int = 0,
    seed: int = 0,
    max_steps: int = 300,
    mode: ProductMode = "auto",
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Show = None,
) -> Eigenvalues:
    """The `k` largest eigenvalues of the Hessian by Lanczos, each to `tol` of its own size.

    Stops when each residual bound is at most `tol |value| / 10` and reports no residual below
    `tol |value| / 2`: a small one says that *some* eigenvalue is near, and a Ritz value on its way
    past a cluster pauses below the largest. One of 1,500 searches in hard spectra had a larger error
    (`benchmarks/analysis.py stopping`). Where several values of one end are wanted, further runs
    look for copies of multiple eigenvalues. The basis takes `8 * steps` bytes a weight.

    Examples:
        >>> model = torch.nn.Linear(3, 1, bias=False).double()
        >>> data = torch.diag(torch.tensor([3.0, 2.0, 1.0])).double(), torch.zeros(3, 1).double()
        >>> problem = Problem(model, lambda out, y: (out - y).square().sum(1).mean() * 1.5, data)
        >>> [round(value, 6) for value in top_eigs(problem, k=2, tol=1e-9).values.tolist()]
        [9.0, 4.0]
    """
    check_problem(problem)
    _check(problem, k, smallest, tol, max_steps)
    origin = problem.describe()
    settings = {"analysis": "top_eigs", "k": k, "tol": tol, "smallest": smallest, "seed": seed}
    bar = Progress("top_eigs", min(max_steps, problem.size), progress)
    with problem.replica() as replica:
        store = Checkpoint(checkpoint, {**settings, "mode": mode, **origin})
        search = _Search(Hessian(replica, mode), (k, smallest), tol, seed, max_steps, store, bar)
        top, bottom = search.run()
        bar.close()
    if not search.converged:
        warnings.warn(
            f"top_eigs stopped after max_steps={max_steps} with residuals "
            f"{[f'{pair.residual:.2g}' for pair in top + bottom]}, above tol={tol}. "
            "The residuals bound the error; raise max_steps for more digits.",
            RuntimeWarning,
            stacklevel=2,
        )
    store.remove()
    found = {
        "values": [pair.value for pair in top],
        "residuals": [pair.residual for pair in top],
        "smallest": [pair.value for pair in bottom],
        "smallest_residuals": [pair.residual for pair in bottom],
    }
    return Eigenvalues(
        origin=origin,
        **{name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in found.items()},
        converged=search.converged,
        products=search.hessian.count,
        tol=tol,
        seed=seed,
    )


@dataclass
class _Pair:
    value: float
    residual: float
    vector: Tensor


_Known = tuple[float, float, int]
"""Values between the first two are of no use; the last is the number of steps of the first run."""


@dataclass
class _Search:
    """Lanczos runs, each orthogonal to the eigenvectors found before it."""

    hessian: Hessian
    counts: tuple[int, int]
    tol: float
    seed: int
    max_steps: int
    checkpoint: Checkpoint
    bar: Progress
    converged: bool = True

    def run(self) -> tuple[list[_Pair], list[_Pair]]:
        krylov = Krylov(self.hessian.size, self.hessian.eps, self.seed)
        stored = self.checkpoint.load()
        if stored:
            krylov.restore(stored)
            self.hessian.count = len(krylov)
        self.bar.start(self.hessian.replica.problem, "products", part=len(krylov) / self.bar.total)
        self._grow(krylov, self.counts)
        top, bottom = self._pairs(krylov, self.counts)
        while not krylov.exhausted and self._add_missed(top, bottom, len(krylov)):
            pass
        rounding = 10 * self.hessian.eps * krylov.scale
        for pair in top + bottom:
            least = 0.5 * self.tol * abs(pair.value)
            if least < 100 * rounding:
                # Near the precision of a product, the recurrence's bound is to be checked.
                remainder = self.hessian(pair.vector) - pair.value * pair.vector
                pair.residual = max(pair.residual, remainder.norm().item())
            pair.residual = max(pair.residual + rounding, least)
        return top, bottom

    def _grow(self, krylov: Krylov, counts: tuple[int, int], beside: _Known | None = None) -> None:
        """Take steps until the values wanted have settled, or lie inside what is known."""
        while not krylov.exhausted and not self._settled(krylov, counts, beside):
            if len(krylov) >= self.max_steps:
                self.converged = False
                return
            krylov.step(self.hessian)
            if beside is None:
                self.checkpoint.save(krylov.state)
            self.bar.step(f"largest {krylov.ritz()[0][-1]:.4g}" if self.bar.show else "")

    def _settled(self, krylov: Krylov, counts: tuple[int, int], beside: _Known | None) -> bool:
        """Whether each value wanted has a residual bound of a tenth of `tol`."""
        top, bottom = counts
        if len(krylov) < max(1, min(top + bottom, krylov.room)):
            return False
        values, _, bounds = krylov.ritz()
        ends = torch.cat([torch.arange(len(values) - top, len(values)), torch.arange(bottom)])
        values, bounds = values[ends], bounds[ends]
        if beside is not None:
            lower, upper, steps = beside
            inside = (values + bounds < upper) & (values - bounds > lower)
            if len(krylov) >= steps and inside.all():
                return True
        noise = 10 * self.hessian.eps * krylov.scale
        return bool((bounds <= torch.clamp(0.1 * self.tol * values.abs(), min=noise)).all())

    def _pairs(self, krylov: Krylov, counts: tuple[int, int]) -> tuple[list[_Pair], list[_Pair]]:
        values, vectors, bounds = krylov.ritz()

        def pair(i: int) -> _Pair:
            return _Pair(values[i].item(), bounds[i].item(), krylov.combine(vectors[:, i]))

        last = len(values) - 1
        return [pair(last - i) for i in range(counts[0])], [pair(i) for i in range(counts[1])]

    def _add_missed(self, top: list[_Pair], bottom: list[_Pair], steps: int) -> bool:
        """Look once more beside what is known; True if that changed the answer.

        A second copy of an eigenvalue shows after as many steps as the first copy took.
        """
        counts = (int(len(top) > 1), int(len(bottom) > 1))
        if counts == (0, 0):
            return False
        known = torch.stack([pair.vector for pair in top + bottom])
        # Two ends that meet (small problems) share vectors: a basis of their span is needed.
        locked = tuple(torch.linalg.qr(known.T)[0].T)
        if len(locked) >= self.hessian.size:
            return False
        krylov = Krylov(self.hessian.size, self.hessian.eps, self.seed + 1, locked)
        lower = bottom[-1].value if counts[1] else -float("inf")
        upper = top[-1].value if counts[0] else float("inf")
        self._grow(krylov, counts, (lower, upper, steps))
        above, below = self._pairs(krylov, counts)
        changed = False
        for found, kept, sign in ((above, top, 1), (below, bottom, -1)):
            for pair in found:
                if sign * (pair.value - kept[-1].value) > pair.residual + kept[-1].residual:
                    kept[-1] = pair
                    kept.sort(key=lambda p: -sign * p.value)
                    changed = True
        return changed


def _check(problem: Problem, k: int, smallest: int, tol: float, max_steps: int) -> None:
    if k < 0 or smallest < 0 or k + smallest < 1:
        raise ValueError(f"k must be at least 1, got k={k} and smallest={smallest}.")
    if max(k, smallest) > problem.size:
        raise ValueError(
            f"k must be at most the number of weights under analysis, {problem.size}; "
            f"got k={k}, smallest={smallest}."
        )
    if not tol > 0:
        raise ValueError(f"tol must be above 0, got {tol}.")
    if max_steps < min(k + smallest, problem.size):
        raise ValueError(f"max_steps={max_steps} cannot give {k + smallest} eigenvalues.")
