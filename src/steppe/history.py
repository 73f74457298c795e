"""History: what perturbations remember from step to step, and what they learn at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steppe.distributed import Statistics
from steppe.perturbations import Gradients, Perturbation, State
from steppe.step import Step

if TYPE_CHECKING:
    from steppe.training import Training


class History:
    """The states of a method's perturbations; equal perturbations of several passes share one."""

    def __init__(self, training: Training) -> None:
        self._training = training
        noises = [p.perturbation for p in training.method.passes if p.perturbation is not None]
        self.states: dict[Perturbation, State] = {n: n.init(training.weights) for n in noises}
        self._statistics = Statistics(training.model, training.method, training.ranks)

    @torch.no_grad()
    def learn(self, step: Step) -> None:
        """Learn from the gradients of a step that is about to be taken."""
        several = self._training.several
        for noise in self.states:
            if noise.learns_from == "step" or (noise.learns_from == "pass" and not several):
                self._learn_as_seen(noise)
        self._learn_noted(step)

    def _learn_as_seen(self, noise: Perturbation) -> None:
        """From the gradients as the optimizer sees them; a fused one unscales them by itself."""
        training = self._training
        grads = [slot.param.grad if slot.active else None for slot in training.weights.slots]
        scale = getattr(training.optimizer, "grad_scale", None)
        scale = 1.0 if scale is None else 1.0 / scale
        noise.learn(training.weights, self.states[noise], grads, scale)

    def _learn_noted(self, step: Step) -> None:
        """From the K perturbed passes' own gradients, v <- beta v + mean_k ‖g_k‖², each undone of
        its loss divisor and loss scale (its weight was undone when it was noted)."""
        training = self._training
        several = training.several
        noises = [n for n in self.states if n.learns_from == "pass" and several]
        nothing: Gradients = [None] * len(training.weights.slots)
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
