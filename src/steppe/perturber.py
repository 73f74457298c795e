"""The perturber: what `attach` gives the user."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steppe.distributed import Ranks
from steppe.history import check_same_tensors, difference
from steppe.hooks import Hooks
from steppe.methods import Method
from steppe.noise import VERSION, Draw
from steppe.passes import Answers, Run, deal
from steppe.training import Training

FORMAT = 1
"""Of the state dict. Raise it when its meaning changes."""
UNSAID = re.compile(r" at 0x[0-9a-f]+|, rise=None|, merged=False|, defaults=None")
"""What settings leave out: addresses, and fields that other versions do not have."""

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

    @property
    def rise(self) -> float:
        """By how much the perturbation raises the loss."""
        return self.perturbed - self.true

    def __str__(self) -> str:
        return (
            f"loss {self.true:.4g} at the true weights, {self.perturbed:.4g} ± {self.stderr:.2g} "
            f"at perturbed ones (n={self.samples})"
        )


class Perturber:
    """A method at work on a model. Keep it to save, inspect or detach; the loop needs no more."""

    def __init__(self, training: Training, hooks: Hooks, skipped: dict[str, str]) -> None:
        self._training, self._hooks, self._skipped = training, hooks, skipped
        self._attached = True

    @property
    def method(self) -> Method:
        return self._training.method

    @property
    def batches_needed(self) -> int:
        """How many batches `backward` takes: one, if the passes run on different ranks."""
        return 1 if self.ranks.index is not None else self.method.batches_needed

    @property
    def step(self) -> int:
        """Optimizer steps taken since training began."""
        return self._training.number

    @property
    def ranks(self) -> Ranks:
        """This process among those that share each step: which pass it runs, of how many."""
        return self._training.ranks

    @property
    def perturbed(self) -> bool:
        """Whether the weights are away from their true values at this moment."""
        return self._training.weights.away

    def restore(self) -> None:
        """Put the true weights back now, if a forward was interrupted or its loss thrown away."""
        self._training.restore()

    def new_step(self, *, drop_gradients: bool = False) -> None:
        """Forget the passes since the last optimizer step, where a loop threw their gradients away
        in a way that cannot be seen (or throws them away here)."""
        self._training.restore()
        self._training.new_step()
        if drop_gradients:
            self._training.set_gradients_aside()

    def detach(self) -> None:
        """Put the true weights back and remove every trace from model and optimizer.

        The perturber keeps its state and no reference to the model.
        """
        if self._attached:
            self._training.restore()
            self._hooks.remove()
            self._training.let_go()
            self._attached = False

    # ------------------------------------------------------------------ passes by hand

    def passes(self) -> Iterator[Run]:
        """The passes of one step, to be entered one after the other:

        `for run, (x, y) in zip(perturber.passes(), batches): with run: loss(x, y).backward()`
        """
        self._check_attached()
        training = self._training
        if self.method.m is not None:
            raise RuntimeError(
                f"{self.method.name}(m={self.method.m}) slices the batch by itself. Use "
                "perturber.backward(loss_of, batch)."
            )
        training.new_step_if_abandoned()
        mine = training.ranks.index
        for index, planned in enumerate(self.method.passes):
            if mine is None:
                yield Run(training, index, planned.weight)
            elif index == mine:
                yield Run(training, index, planned.weight * len(self.method.passes))

    def next_pass(self) -> Run:
        """The pass whose turn it is in a loop over micro-batches, to hold open over one of them:
        `with perturber.next_pass(): loss_fn(model(x), y).backward()`"""
        self._check_attached()
        self._training.new_step_if_abandoned()
        index, factor = self._training.next_pass()
        return Run(self._training, index, factor, by_hooks=True)

    def backward(self, loss_of: Callable[..., Any], *batches: Any) -> Any:
        """Run all passes of a step and leave the method's gradient in `.grad`.

        `loss_of(*batch)` gives the loss of a batch. Methods that use one batch take one (or none:
        `backward(lambda: loss_fn(model(x), y))`), the mixed methods take two. Returns the loss that
        the method minimises, without its graph. What `loss_of` returns beside it, as a tuple whose
        first item is the loss or a mapping with "loss", comes back too: from the true weights where
        the method has such a pass, as a list where it slices the batch.
        """
        self._check_attached()
        if not callable(loss_of):
            raise TypeError(
                f"backward() takes a function that gives the loss, got {type(loss_of).__name__}. "
                "Write perturber.backward(lambda: loss_fn(model(x), y))."
            )
        training = self._training
        work = deal(self.method, batches, training.ranks.index)
        training.new_step_if_abandoned()
        answers = Answers()
        for number, batch, factor in work:
            run = Run(training, number, factor, weighs_loss=True)
            with run, torch.enable_grad():
                answer = loss_of(*batch)
                run.backward(answers.loss(answer))
            answers.add(answer, factor, clean=not run.perturbed)
        return answers.result()

    # ------------------------------------------------------------------ is it working?

    def stats(self) -> dict[str, float]:
        """Step, strength, relative displacement ‖eps‖/‖w‖, adaptive factor (median) and counts.

        Computed when asked, from the current weights: nothing is measured on the way. Any rank may
        ask alone: of sharded weights the norms are those of the last pass, and what would need an
        exchange with other ranks is NaN.
        """
        shards = self._training.weights.shards
        shards.silent = True
        try:
            return self._stats()
        finally:
            shards.silent = False

    def _stats(self) -> dict[str, float]:
        training, weights = self._training, self._training.weights
        stats: dict[str, float] = {"step": self.step, "strength": 0.0, "displacement": 0.0}
        for noise, state in training.history.states.items():
            stats["strength"] = noise.strength(self.step)
            with torch.no_grad():
                size = torch.linalg.vector_norm(weights.filter_norms())
                try:
                    radius = float(noise.radius(weights, state, self.step))
                except NotImplementedError:  # an own perturbation need not know it
                    radius = float("nan")
                if noise.steering is not None:
                    (memory,) = state["steering"]
                    found = noise.steering.read(memory, self.step)
                    stats |= {"rise": found.asked, "measured_rise": found.measured}
                    stats |= {"measured_rise_stderr": found.stderr, "ramp": found.ramp}
                    stats["ratio"] = found.ratio
                    radius *= found.ratio
                stats["displacement"] = radius / max(float(size), 1e-30)
                stats.update(noise.stats(state))
            break
        stats["perturbed_parameters"] = sum(s.param.numel() for s in weights.params if s.noisy)
        stats["passes_since_step"] = len(training.step.done)
        stats["incomplete_steps"] = training.incomplete
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
                self._training.step.gradient = self._gradient(closure)
            found.append(self._look(closure, index, sample))
        values = torch.tensor(found, dtype=torch.float64)
        stderr = float(values.std() / samples**0.5) if samples > 1 else float("nan")
        return Probe(true, float(values.mean()), stderr, samples)

    def _look(self, closure: Callable[[], Tensor], index: int | None, sample: int = 0) -> float:
        draw = Draw(self._training.seed + sample, self.step, PROBE_STREAM)
        with torch.random.fork_rng(), self._training.probe(index, draw), torch.no_grad():
            return float(closure())

    def _gradient(self, closure: Callable[[], Tensor]) -> list[Tensor | None]:
        draw, params = Draw(0, 0), [slot.param for slot in self._training.weights.active]
        with torch.random.fork_rng(), self._training.probe(None, draw), torch.enable_grad():
            return list(torch.autograd.grad(closure(), params, allow_unused=True))

    def __repr__(self) -> str:
        training, weights, stats = self._training, self._training.weights, self.stats()
        groups = training.optimizer.param_groups
        now_out = {p for group in groups if not group.get("perturb", True) for p in group["params"]}
        perturbed = [s for s in weights.params if s.noisy and s.param not in now_out]
        count = sum(slot.param.numel() for slot in perturbed)
        displacement = stats["displacement"]
        known = "unknown" if math.isnan(displacement) else f"= {displacement:.3g}"
        lines = [
            f"{self.method.name} at step {self.step}, {self._strength(stats)}: "
            f"{count:,} weights of {len(perturbed)} parameters in {weights.filters:,} filters, "
            f"expected ‖eps‖/‖w‖ {known}",
        ]
        ranks = self.ranks
        if ranks.index is not None:
            kind = "perturbed" if self.method.passes[ranks.index].perturbation else "clean"
            lines.append(
                f"  {len(self.method.passes)} passes over {ranks.size} replicas; this is replica "
                f"{ranks.rank} and runs pass {ranks.index} ({kind})"
            )
        how = {True: "", False: " frozen"}
        lines += [f"  perturbed  {s.name} {tuple(s.shape)}{how[s.active]}" for s in perturbed]
        left_out = self._skipped | {s.name: "frozen" for s in weights.params if not s.noisy}
        left_out |= {
            s.name: "perturb=False in its group" for s in weights.params if s.param in now_out
        }
        for name in training.leaves.added():
            left_out[name] = "added to the optimizer after attach()"
        lines += [f"  left out   {name}: {why}" for name, why in left_out.items()]
        return "\n".join(lines)

    def _strength(self, stats: dict[str, float]) -> str:
        if "rise" not in stats:
            return f"strength {stats['strength']:g}"
        return (
            f"steered to a loss rise of {stats['rise']:g} (ramp {stats['ramp']:.2g}, measured "
            f"{stats['measured_rise']:.2g}, ratio {stats['ratio']:.2g})"
        )

    # ------------------------------------------------------------------ save and load

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to resume bit-exactly: step, seed and history."""
        training, weights = self._training, self._training.weights
        # where a function lies in memory is no setting of it
        settings = UNSAID.sub("", repr(self.method))
        return {
            "format": FORMAT,
            "noise": VERSION,
            "method": self.method.name,
            "settings": settings,
            "seed": training.seed,
            "step": self.step,
            "incomplete": training.incomplete,
            "parameters": [[s.name, list(s.param.shape)] for s in weights.params],
            "states": [dict(state) for state in training.history.states.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where a saved run stopped. Raises, with nothing changed, if it does not fit."""
        training, mine = self._training, self.state_dict()
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
                f"{difference(state['parameters'], mine['parameters'])}."
            )
        check_same_tensors(state["states"], mine["states"])
        if UNSAID.sub("", state["settings"]) != mine["settings"]:
            warnings.warn(
                f"Settings differ from the saved ones: {state['settings']} was saved, "
                f"{mine['settings']} is used from here on.",
                stacklevel=2,
            )
        if state.get("noise", 1) != VERSION:
            warnings.warn(
                "The state was saved by a version of steppe that drew other noise for a seed: training "
                "resumes with its step and history, but not bit for bit as that version would.",
                stacklevel=2,
            )
        self.restore()
        with torch.no_grad():
            for saved, here in zip(state["states"], mine["states"], strict=True):
                for name, tensors in here.items():
                    for old, new in zip(tensors, saved[name], strict=True):
                        old.copy_(new)
        training.seed = state["seed"]
        training.number, training.incomplete = state["step"], state["incomplete"]
        training.new_step()

    def _check_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("This perturber was detached. Attach again to use it.")
