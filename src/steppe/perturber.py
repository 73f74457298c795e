"""The perturber: what `attach` gives the user."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steppe.batches import deal
from steppe.engine import Engine, Run
from steppe.hooks import Hooks
from steppe.methods import Method
from steppe.noise import Draw

FORMAT = 1
"""Of the state dict. Raise it when its meaning changes."""

PROBE_STREAM = 4095
"""Noise for `probe`, which must not be the noise of training."""


@dataclass(frozen=True)
class Probe:
    """The loss at the true weights and, on average over draws, at perturbed ones."""

    true: float
    perturbed: float
    stderr: float
    """Standard error of `perturbed` over the draws (NaN for a single one)."""
    samples: int

    def __str__(self) -> str:
        return (
            f"loss {self.true:.4g} at the true weights, {self.perturbed:.4g} ± {self.stderr:.2g} "
            f"at perturbed ones (n={self.samples})"
        )


class Perturber:
    """A method at work on a model. Keep it to save, inspect or detach; the loop needs no more."""

    def __init__(self, engine: Engine, hooks: Hooks, skipped: dict[str, str]) -> None:
        self._engine, self._hooks, self._skipped = engine, hooks, skipped
        self._attached = True

    @property
    def method(self) -> Method:
        return self._engine.method

    @property
    def batches_needed(self) -> int:
        """How many batches `backward` takes: one, if the passes run on different ranks."""
        return 1 if self._engine.ledger.ranks.index is not None else self.method.batches_needed

    @property
    def step(self) -> int:
        """Optimizer steps taken since training began."""
        return self._engine.ledger.step

    def restore(self) -> None:
        """Put the true weights back now, if a forward was interrupted or its loss thrown away."""
        self._engine.restore()

    def detach(self) -> None:
        """Put the true weights back and remove every trace from model and optimizer."""
        self._engine.restore()
        self._engine.weights.free()
        self._hooks.remove()
        self._attached = False

    # ------------------------------------------------------------------ explicit doors

    def passes(self) -> Iterator[Run]:
        """The passes of one step, to be entered one after the other:

        `for run, (x, y) in zip(perturber.passes(), batches): with run: loss(x, y).backward()`
        """
        self._check_attached()
        if self.method.m is not None:
            raise RuntimeError(
                f"{self.method.name}(m={self.method.m}) slices the batch by itself. Use "
                "perturber.backward(loss_of, batch)."
            )
        self._engine.ledger.new_step_if_abandoned()
        mine = self._engine.ledger.ranks.index
        for index, planned in enumerate(self.method.passes):
            if mine is None:
                yield Run(self._engine, index, planned.weight)
            elif index == mine:
                yield Run(self._engine, index, planned.weight * len(self.method.passes))

    def backward(self, loss_of: Callable[..., Tensor], *batches: Any) -> Tensor:
        """Run all passes of a step and leave the method's gradient in `.grad`.

        `loss_of(*batch)` gives the loss of a batch. Methods that use one batch take one (or none:
        `backward(lambda: loss_fn(model(x), y))`), the mixed methods take two. Returns the loss that
        the method minimises, without its graph.
        """
        self._check_attached()
        if not callable(loss_of):
            raise TypeError(
                f"backward() takes a function that gives the loss, got {type(loss_of).__name__}. "
                "Write perturber.backward(lambda: loss_fn(model(x), y))."
            )
        work = deal(self.method, batches, self._engine.ledger.ranks.index)
        self._engine.ledger.new_step_if_abandoned()
        total: Tensor | None = None
        for number, batch, factor in work:
            with Run(self._engine, number, factor), torch.enable_grad():
                loss = loss_of(*batch)
                self._backward(loss)
            part = loss.detach() * factor
            total = part if total is None else total + part
        assert total is not None
        return total

    def _backward(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"loss_of must return the loss, a tensor with one value; got {got}.")
        scaler = self._engine.ledger.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    # ------------------------------------------------------------------ is it working?

    def stats(self) -> dict[str, float]:
        """Step, strength, relative displacement ‖eps‖/‖w‖, adaptive factor (median) and counts.

        Computed when asked, from the current weights: nothing is measured on the way. Any rank may
        ask alone: of sharded weights the norms are those of the last pass, and what would need an
        exchange with other ranks is NaN.
        """
        shards = self._engine.weights.shards
        shards.silent = True
        try:
            return self._stats()
        finally:
            shards.silent = False

    def _stats(self) -> dict[str, float]:
        ledger, weights = self._engine.ledger, self._engine.weights
        stats: dict[str, float] = {"step": ledger.step, "strength": 0.0, "displacement": 0.0}
        for noise, state in ledger.states.items():
            stats["strength"] = noise.strength(ledger.step)
            with torch.no_grad():
                size = torch.linalg.vector_norm(weights.filter_norms())
                radius = noise.radius(weights, state, ledger.step)
                stats["displacement"] = float(radius) / max(float(size), 1e-30)
                stats.update(noise.stats(state))
            break
        stats["perturbed_parameters"] = sum(s.param.numel() for s in weights.active)
        stats["passes_since_step"] = len(ledger.done)
        stats["incomplete_steps"] = ledger.incomplete
        return stats

    def probe(self, closure: Callable[[], Tensor], samples: int = 4) -> Probe:
        """Compare the loss at the true weights with the loss at perturbed ones.

        `closure` gives the loss. Each sample is a fresh draw; dropout and the like see the same
        random numbers every time, and neither the run nor the global random state is touched.
        """
        self._check_attached()
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}.")
        passes = self.method.passes
        index = next((i for i, p in enumerate(passes) if p.perturbation is not None), 0)
        noise = passes[index].perturbation
        true = self._look(closure, None)
        found = []
        for sample in range(samples):
            if noise is not None and noise.needs_gradient:
                self._engine.gradient = self._gradient(closure)
            found.append(self._look(closure, index, sample))
        values = torch.tensor(found, dtype=torch.float64)
        stderr = float(values.std() / samples**0.5) if samples > 1 else float("nan")
        return Probe(true, float(values.mean()), stderr, samples)

    def _look(self, closure: Callable[[], Tensor], index: int | None, sample: int = 0) -> float:
        draw = Draw(self._engine.seed + sample, self.step, PROBE_STREAM)
        with torch.random.fork_rng(), self._engine.probe(index, draw), torch.no_grad():
            return float(closure())

    def _gradient(self, closure: Callable[[], Tensor]) -> list[Tensor | None]:
        draw, params = Draw(0, 0), [slot.param for slot in self._engine.weights.active]
        with torch.random.fork_rng(), self._engine.probe(None, draw), torch.enable_grad():
            return list(torch.autograd.grad(closure(), params, allow_unused=True))

    def __repr__(self) -> str:
        weights, stats = self._engine.weights, self.stats()
        count = sum(slot.param.numel() for slot in weights.active)
        lines = [
            f"{self.method.name} at step {self.step}, strength {stats['strength']:g}: "
            f"{count:,} weights of {len(weights.active)} parameters in {weights.filters:,} filters, "
            f"expected ‖eps‖/‖w‖ = {stats['displacement']:.3g}",
        ]
        ranks = self._engine.ledger.ranks
        if ranks.index is not None:
            kind = "perturbed" if self.method.passes[ranks.index].perturbation else "clean"
            lines.append(
                f"  {len(self.method.passes)} passes over {ranks.size} replicas; this is replica "
                f"{ranks.rank} and runs pass {ranks.index} ({kind})"
            )
        lines += [f"  perturbed  {s.name} {tuple(s.param.shape)}" for s in weights.active]
        frozen = {s.name: "frozen" for s in weights.params if not s.active}
        lines += [
            f"  left out   {name}: {why}" for name, why in {**self._skipped, **frozen}.items()
        ]
        return "\n".join(lines)

    # ------------------------------------------------------------------ save and load

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to go on bit for bit: step, seed and history."""
        ledger, weights = self._engine.ledger, self._engine.weights
        return {
            "format": FORMAT,
            "method": self.method.name,
            "settings": repr(self.method),
            "seed": self._engine.seed,
            "step": ledger.step,
            "incomplete": ledger.incomplete,
            "parameters": [[s.name, list(s.param.shape)] for s in weights.params],
            "states": [dict(state) for state in ledger.states.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved run stopped. Raises, with nothing changed, if it does not fit."""
        ledger, mine = self._engine.ledger, self.state_dict()
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError(
                f"This is not a state dict of a perturber (format {FORMAT}); its keys are "
                f"{list(state) if isinstance(state, dict) else type(state).__name__}."
            )
        if state["method"] != mine["method"]:
            raise ValueError(
                f"The state is of {state['method']}(), but {mine['method']}() is attached."
            )
        if state["parameters"] != mine["parameters"]:
            raise ValueError(
                "The state is of another model or another choice of parameters: "
                f"{_difference(state['parameters'], mine['parameters'])}."
            )
        _check_same_tensors(state["states"], mine["states"])
        if state["settings"] != mine["settings"]:
            warnings.warn(
                f"Settings differ from the saved ones: {state['settings']} was saved, "
                f"{mine['settings']} goes on.",
                stacklevel=2,
            )
        self.restore()
        with torch.no_grad():
            for saved, here in zip(state["states"], mine["states"], strict=True):
                for name, tensors in here.items():
                    for old, new in zip(tensors, saved[name], strict=True):
                        old.copy_(new)
        self._engine.seed = state["seed"]
        ledger.step, ledger.incomplete = state["step"], state["incomplete"]
        ledger.new_step()

    def _check_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("This perturber was detached. Attach again to go on with it.")


def _difference(saved: list[Any], here: list[Any]) -> str:
    for old, new in zip(saved, here, strict=False):
        if list(old) != list(new):
            return f"{old[0]} {tuple(old[1])} was saved, {new[0]} {tuple(new[1])} is attached"
    return f"{len(saved)} parameters were saved, {len(here)} are attached"


def _check_same_tensors(saved: list[Any], here: list[Any]) -> None:
    def shapes(states: list[Any]) -> list[Any]:
        return [{k: [tuple(t.shape) for t in v] for k, v in s.items()} for s in states]

    if shapes(saved) != shapes(here):
        raise ValueError(
            "The saved history has another form than this method's (elementwise, or another number "
            "of filters)."
        )
