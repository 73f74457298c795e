"""The largest eigenvalues of the Hessian."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from steppe.analysis.hessian import Hessian
from steppe.analysis.lanczos import Krylov
from steppe.analysis.problem import Problem, check_problem
from steppe.analysis.progress import Progress, Show
from steppe.analysis.results import Result


@dataclass(frozen=True, eq=False, kw_only=True)
class Eigenvalues(Result):
    """The k largest eigenvalues (algebraic, descending).

    `residuals` bound `‖H y - value y‖`: an eigenvalue lies no farther from the value than that (see
    `top_eigs`). `products` counts all Hessian products spent.
    """

    values: Tensor
    residuals: Tensor
    converged: bool
    products: int
    tol: float
    seed: int


def top_eigs(
    problem: Problem,
    k: int = 1,
    tol: float = 1e-3,
    *,
    seed: int = 0,
    max_steps: int = 300,
    progress: Show = None,
) -> Eigenvalues:
    """The `k` largest eigenvalues of the Hessian by Lanczos, each to `tol` of its own size.

    Stops when each residual bound is at most `tol |value| / 10` and reports no residual below
    `tol |value| / 2`: a small one says that *some* eigenvalue is near, and a Ritz value on its way
    past a cluster pauses below the largest. One of 1,500 searches in hard spectra had a larger error
    (docs/analysis.md). Where several values are wanted, further runs look for copies
    of multiple eigenvalues. The basis takes `8 * steps` bytes a weight.

    Examples:
        >>> model = torch.nn.Linear(3, 1, bias=False).double()
        >>> data = torch.diag(torch.tensor([3.0, 2.0, 1.0])).double(), torch.zeros(3, 1).double()
        >>> problem = Problem(model, lambda out, y: (out - y).square().sum(1).mean() * 1.5, data)
        >>> [round(value, 6) for value in top_eigs(problem, k=2, tol=1e-9).values.tolist()]
        [9.0, 4.0]
    """
    check_problem(problem)
    if k < 1:
        raise ValueError(f"k must be at least 1, got k={k}.")
    if k > problem.size:
        raise ValueError(
            f"k must be at most the number of weights under analysis, {problem.size}; got k={k}."
        )
    if not tol > 0:
        raise ValueError(f"tol must be above 0, got {tol}.")
    if max_steps < k:
        raise ValueError(f"max_steps={max_steps} cannot give {k} eigenvalues.")
    origin = problem.describe()
    bar = Progress("top_eigs", min(max_steps, problem.size), progress)
    with problem.replica() as replica:
        search = _Search(Hessian(replica), k, tol, seed, max_steps, bar)
        found = search.run()
        bar.close()
    if not search.converged:
        warnings.warn(
            f"top_eigs stopped after max_steps={max_steps} with residuals "
            f"{[f'{pair.residual:.2g}' for pair in found]}, above tol={tol}. "
            "The residuals bound the error; raise max_steps for more digits.",
            RuntimeWarning,
            stacklevel=2,
        )
    return Eigenvalues(
        origin=origin,
        values=torch.tensor([pair.value for pair in found], dtype=torch.float64),
        residuals=torch.tensor([pair.residual for pair in found], dtype=torch.float64),
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


@dataclass
class _Search:
    """Lanczos runs, each orthogonal to the eigenvectors found before it."""

    hessian: Hessian
    k: int
    tol: float
    seed: int
    max_steps: int
    bar: Progress
    converged: bool = True

    def run(self) -> list[_Pair]:
        krylov = Krylov(self.hessian.size, self.hessian.eps, self.seed)
        self.bar.start(self.hessian.replica.problem, "products")
        found = self._pairs(krylov, self.k)
        while self.k > 1 and not krylov.exhausted and self._add_missed(found, len(krylov)):
            pass
        rounding = 10 * self.hessian.eps * krylov.scale
        for pair in found:
            least = 0.5 * self.tol * abs(pair.value)
            if least < 100 * rounding:
                # Near the precision of a product, the recurrence's bound is to be checked.
                remainder = self.hessian(pair.vector) - pair.value * pair.vector
                pair.residual = max(pair.residual, remainder.norm().item())
            pair.residual = max(pair.residual + rounding, least)
        return found

    def _pairs(self, krylov: Krylov, k: int, below: tuple[float, int] | None = None) -> list[_Pair]:
        """The k largest, after steps until they have settled, or lie `below` a value that is known
        after as many steps as took to find it."""
        while not krylov.exhausted and not self._settled(krylov, k, below):
            if len(krylov) >= self.max_steps:
                self.converged = False
                break
            krylov.step(self.hessian)
            self.bar.step(f"largest {krylov.ritz()[0][-1]:.4g}" if self.bar.show else "")
        values, vectors, bounds = (part.flip(-1) for part in krylov.ritz())
        return [
            _Pair(values[i].item(), bounds[i].item(), krylov.combine(vectors[:, i]))
            for i in range(k)
        ]

    def _settled(self, krylov: Krylov, k: int, below: tuple[float, int] | None) -> bool:
        """Whether each value wanted has a residual bound of a tenth of `tol`."""
        if len(krylov) < k:
            return False
        values, _, bounds = krylov.ritz()
        values, bounds = values[-k:], bounds[-k:]
        if below is not None and len(krylov) >= below[1] and (values + bounds < below[0]).all():
            return True
        noise = 10 * self.hessian.eps * krylov.scale
        return bool((bounds <= torch.clamp(0.1 * self.tol * values.abs(), min=noise)).all())

    def _add_missed(self, found: list[_Pair], steps: int) -> bool:
        """Look once more beside what is known; True if that changed the answer.

        A second copy of an eigenvalue shows after as many steps as the first copy took.
        """
        known = torch.stack([pair.vector for pair in found])
        locked = tuple(torch.linalg.qr(known.T)[0].T)
        # Each time from another start: what is left of the last one has no part in a further copy.
        seed = self.seed + self.hessian.count
        krylov = Krylov(self.hessian.size, self.hessian.eps, seed, locked)
        (pair,) = self._pairs(krylov, 1, below=(found[-1].value, steps))
        if pair.value - found[-1].value <= pair.residual + found[-1].residual:
            return False
        found[-1] = pair
        found.sort(key=lambda p: -p.value)
        return True
