"""The perturber: what `attach` gives the user."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from steppe.distributed import Ranks
from steppe.hooks import Hooks
from steppe.methods import Method
from steppe.noise import VERSION
from steppe.passes import Run, deal, joined, loss_in
from steppe.standins import check_unscaled
from steppe.training import Probe, Training

FORMAT = 1
"""Of the state dict. Raise it when its meaning changes."""
UNSAID = re.compile(r" at 0x[0-9a-f]+|, rise=None|, merged=False|, defaults=None")
"""What settings leave out: addresses, and fields that other versions do not have."""


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
        """Put the true weights back now, if a pass was interrupted or its loss thrown away."""
        self._training.holding = None
        self._training.restore()

    def new_step(self, *, drop_gradients: bool = False) -> None:
        """Forget the passes since the last optimizer step, where a loop threw their gradients away
        in a way that cannot be seen (or throws them away here)."""
        self.restore()
        self._training.new_step()
        if drop_gradients:
            self._training.leaves.set_aside()

    def detach(self) -> None:
        """Put the true weights back, and remove every trace from model and optimizer."""
        if self._attached:
            self._training.restore()
            if self._training.step.unfinished:
                left = "gradients of some of its passes, with their weights. Zero them before you train on."
                warnings.warn(f"detach() in the middle of a step: .grad holds {left}", stacklevel=2)
            self._hooks.remove()
            self._attached = False

    def passes(self) -> Iterator[Run]:
        """The passes of one step, to be entered one after the other:
        `for run, (x, y) in zip(perturber.passes(), batches): with run: loss(x, y).backward()`"""
        self._check_attached()
        training = self._training
        if self.method.m is not None:
            raise RuntimeError(
                f"{self.method.name}(m={self.method.m}) slices the batch by itself. Use "
                "perturber.backward(loss_of, batch)."
            )
        training.new_step_if_abandoned()
        passes, mine = self.method.passes, training.ranks.index
        for index, planned in enumerate(passes):
            if mine in (None, index):
                yield Run(training, index, planned.weight * (1 if mine is None else len(passes)))

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
        the method minimises, without its graph, and what `loss_of` returns beside it (a tuple, loss
        first, or a mapping with "loss"): from the true weights where the method has such a pass, as a
        list where it slices the batch.
        """
        self._check_attached()
        if not callable(loss_of):
            raise TypeError(
                f"backward() takes a function that gives the loss, got {type(loss_of).__name__}. "
                "Write perturber.backward(lambda: loss_fn(model(x), y))."
            )
        work = deal(self.method, batches, self.ranks.index)
        self._training.new_step_if_abandoned()
        values, clean = [], []
        for number, batch, factor in work:
            run = Run(self._training, number, factor, weighs_loss=True)
            with run, torch.enable_grad():
                values.append(loss_of(*batch))
                check_unscaled(self._training, loss := loss_in(values[-1]))
                run.backward(loss)
            clean.append(not run.perturbed)
        return joined(values, [factor for *_, factor in work], clean)

    @torch.no_grad()
    def stats(self) -> dict[str, float]:
        """Step, strength, relative displacement ‖eps‖/‖w‖, adaptive factor (median) and counts.

        Computed when asked, from the current weights. Any rank may ask alone: of sharded weights the
        norms are those of the last pass, and what would need an exchange with other ranks is NaN.
        """
        training, weights = self._training, self._training.weights
        stats: dict[str, float] = {"step": self.step, "strength": 0.0, "displacement": 0.0}
        weights.shards.silent = True
        try:
            for noise, state in list(training.states.items())[:1]:
                stats["strength"] = noise.strength(self.step)
                size = torch.linalg.vector_norm(weights.filter_norms())
                radius = float(noise.radius(weights, state, self.step))
                if noise.steering is not None:
                    found = noise.steering.read(state["steering"][0], self.step)
                    stats |= found._asdict()
                    radius *= found.ratio
                stats["displacement"] = radius / max(float(size), 1e-30)
                stats.update(noise.stats(state))
        finally:
            weights.shards.silent = False
        stats["perturbed_parameters"] = sum(s.param.numel() for s in weights.params if s.noisy)
        stats["passes_since_step"] = len(training.step.done)
        stats["incomplete_steps"] = training.incomplete
        return stats

    def probe(self, closure: Callable[[], Tensor], samples: int = 4) -> Probe:
        """Compare the loss at the true weights with the loss at perturbed ones.

        `closure` gives the loss. Each sample is a fresh draw; dropout and the like see the same
        random numbers every time, and neither the run, buffers nor the global random state are touched.
        """
        self._check_attached()
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}.")
        return self._training.probe(closure, samples)

    def __repr__(self) -> str:
        training, weights, stats = self._training, self._training.weights, self.stats()
        groups = training.optimizer.param_groups
        now_out = {p for group in groups if not group.get("perturb", True) for p in group["params"]}
        perturbed = [s for s in weights.params if s.noisy and s.param not in now_out]
        count = sum(slot.param.numel() for slot in perturbed)
        known = "unknown" if math.isnan(size := stats["displacement"]) else f"= {size:.3g}"
        strength = "strength {strength:g}"
        if "rise" in stats:
            strength = (
                "steered to a loss rise of {rise:g} (ramp {ramp:.2g}, measured {measured_rise:.2g}, "
                "ratio {ratio:.2g})"
            )
        lines = [
            f"{self.method.name} at step {self.step}, {strength.format(**stats)}: "
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
        lines += [
            f"  perturbed  {s.name} {tuple(s.shape)}{'' if s.active else ' frozen'}"
            for s in perturbed
        ]
        left_out = self._skipped | {
            s.name: "perturb=False in its group" if s.param in now_out else "frozen"
            for s in weights.params
            if s not in perturbed
        }
        left_out |= dict.fromkeys(training.leaves.added(), "added to the optimizer after attach()")
        lines += [f"  left out   {name}: {why}" for name, why in left_out.items()]
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to resume bit-exactly: step, seed and history."""
        training, weights = self._training, self._training.weights
        return {
            "format": FORMAT,
            "noise": VERSION,
            "method": self.method.name,
            "settings": UNSAID.sub("", repr(self.method)),
            "seed": training.seed,
            "step": self.step,
            "incomplete": training.incomplete,
            "fresh": list(training.fresh),
            "divisors": list(training.divisors),
            "parameters": [[s.name, list(s.param.shape)] for s in weights.params],
            "states": [dict(state) for state in training.states.values()],
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
                f"{_difference(state['parameters'], mine['parameters'])}."
            )
        saved, here = (
            [{name: [t.shape for t in tensors] for name, tensors in of.items()} for of in states]
            for states in (state["states"], mine["states"])
        )
        if saved != here:
            raise ValueError(
                "The saved history has another form than this method's (elementwise, or another "
                "number of filters)."
            )
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
        training.fresh = list(state.get("fresh", ()))
        training.divisors = list(state.get("divisors", (1.0, 1.0)))
        training.new_step()

    def _check_attached(self) -> None:
        if not self._attached:
            raise RuntimeError("This perturber was detached. Attach again to use it.")


def _difference(saved: list[Any], here: list[Any]) -> str:
    """How the parameters of a saved state differ from those attached."""
    for old, new in zip(saved, here, strict=False):
        if list(old) != list(new):
            return f"{old[0]} {tuple(old[1])} was saved, {new[0]} {tuple(new[1])} is attached"
    return f"{len(saved)} parameters were saved, {len(here)} are attached"
