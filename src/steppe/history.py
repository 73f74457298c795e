"""History: what perturbations remember from step to step, and what they learn at each step."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steppe.distributed import Statistics
from steppe.perturbations import Gradients, Perturbation, State
from steppe.step import Step
from steppe.strength import OPENING, PERIOD

if TYPE_CHECKING:
    from steppe.training import Training


class History:
    """The states of a method's perturbations; equal perturbations of several passes share one."""

    def __init__(self, training: Training) -> None:
        self._training = training
        noises = [p.perturbation for p in training.method.passes if p.perturbation is not None]
        self.states: dict[Perturbation, State] = {n: n.init(training.weights) for n in noises}
        for noise, state in self.states.items():
            if noise.steering is not None:
                state["steering"] = [noise.steering.init(training.weights.sizes)]
        self._halvings = 0
        self._statistics = Statistics(training.model, training.method, training.ranks)

    @torch.no_grad()
    def learn(self, step: Step) -> None:
        """Learn from the gradients of a step that is about to be taken."""
        training, several = self._training, self._training.several
        if training.metered:
            self._steer(step)
        for noise in self.states:
            of_pass = noise.learns_from == "pass" and not several and not training.resting
            if noise.learns_from == "step" or of_pass:
                self._learn_as_seen(noise)
        if not training.resting:
            self._learn_noted(step)

    def _steer(self, step: Step) -> None:
        """Let the strength follow the rise that was measured, the mean over passes and ranks."""
        training, weights = self._training, self._training.weights
        if not step.pulls:
            raise RuntimeError(
                f"{training.method.name}(rise=…) follows how hard the loss pulls on the model's outputs, "
                "but the attached model was not called in this step. Call it, or give a fixed strength "
                "(ratio=…)."
            )
        scale = training.loss_scale()
        unit = 1.0 if training.pull_is_loss else step.divisor / scale
        pulls = [p.to(weights.sizes) for p in step.pulls]
        sums, counts = [reduce(torch.add, pulls) * unit], [len(pulls)]
        for noise in self.states:
            slopes = step.slopes.get(noise, [])
            total = reduce(torch.add, slopes) if slopes else weights.sizes.new_zeros(())
            sums.append(total * (training.slope_factor(noise, step) / scale))
            counts.append(len(slopes))
        pull, *found = self._means(sums, counts)
        for (noise, state), slope in zip(self.states.items(), found, strict=True):
            if noise.steering is not None:
                (memory,) = state["steering"]
                elapsed = 1 if training.number <= OPENING else PERIOD
                noise.steering.update(memory, slope, pull, training.number, elapsed)
                if training.number > 100 and training.number % 100 == 1 and not memory.is_meta:
                    self._halvings = noise.steering.warn(memory, training.number, self._halvings)

    def _means(self, sums: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Sums over passes divided by their number, those of all ranks."""
        ranks = self._training.ranks
        if not ranks.groups:
            return [
                total / count if count else total for total, count in zip(sums, counts, strict=True)
            ]
        both = torch.stack([*sums, *(sums[0].new_tensor(float(count)) for count in counts)])
        totals, numbers = ranks.sum(both)[0].chunk(2)
        return list((totals / numbers).unbind())

    def _learn_as_seen(self, noise: Perturbation) -> None:
        """From the gradients as the optimizer sees them; a fused one unscales them by itself."""
        training = self._training
        grads = [slot.param.grad if slot.active else None for slot in training.weights.params]
        scale = getattr(training.optimizer, "grad_scale", None)
        scale = 1.0 if scale is None else 1.0 / scale
        noise.learn(training.weights, self.states[noise], grads, scale)

    def _learn_noted(self, step: Step) -> None:
        """From the K perturbed passes' own gradients, v <- beta v + mean_k ‖g_k‖², each undone of
        its loss divisor and loss scale (its weight was undone when it was noted)."""
        training = self._training
        several = training.several
        noises = [n for n in self.states if n.learns_from == "pass" and several]
        nothing: Gradients = [None] * len(training.weights.params)
        notes = [step.notes.get(noise, nothing) for noise in noises]
        planned = [training.method.passes[i].perturbation for i in step.done]
        counts: list[Tensor | float] = [planned.count(noise) for noise in noises]
        if training.ranks.groups and (noises or self._statistics.buffers):
            notes, counts = self._exchange(notes, counts)
        for noise, noted, count in zip(noises, notes, counts, strict=True):
            if isinstance(count, Tensor) or count:
                scale = step.divisor / count**0.5 / training.loss_scale()
                noise.learn_noted(training.weights, self.states[noise], noted, scale)

    def _exchange(
        self, notes: list[Gradients], counts: list[Tensor | float]
    ) -> tuple[list[Gradients], list[Tensor | float]]:
        """Tell all ranks, in one small message: squared norms, how many, and BN's statistics."""
        weights, ranks = self._training.weights, self._training.ranks
        vectors = [weights.per_filter(noted) for noted in notes]
        parts = [*vectors, weights.sizes.new_tensor(counts), self._statistics.pack(weights.sizes)]
        *vectors, total, statistics = ranks.sum(*parts)
        self._statistics.unpack(statistics)
        return [weights.per_parameter(vector) for vector in vectors], list(total)


def difference(saved: list[Any], here: list[Any]) -> str:
    """How the parameters of a saved state differ from those attached."""
    for old, new in zip(saved, here, strict=False):
        if list(old) != list(new):
            return f"{old[0]} {tuple(old[1])} was saved, {new[0]} {tuple(new[1])} is attached"
    return f"{len(saved)} parameters were saved, {len(here)} are attached"


def check_same_tensors(saved: list[Any], here: list[Any]) -> None:
    """Raise if a saved history does not fit."""
    shapes = [[{k: [t.shape for t in v] for k, v in s.items()} for s in x] for x in (saved, here)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "The saved history has another form than this method's (elementwise, or another number "
            "of filters)."
        )
