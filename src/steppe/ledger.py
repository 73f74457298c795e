"""The ledger: what has happened since the last optimizer step, and what is learnt from it.

It counts passes, weighs their gradients as they arrive, and before the optimizer's update sees to
it that what the optimizer finds in `.grad` is the weighted sum that the method asks for.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steppe.layout import is_sharded
from steppe.methods import Method
from steppe.parallel import Ranks, Statistics
from steppe.perturbations import Gradients, Perturbation, State
from steppe.weights import Weights


class Ledger:
    """Gradients of the passes of one method, step by step."""

    def __init__(
        self,
        method: Method,
        weights: Weights,
        optimizer: torch.optim.Optimizer,
        *,
        microbatch_loss: Literal["mean", "sum"],
        on_incomplete: Literal["warn", "raise"],
        scaler: torch.amp.GradScaler | None,
        ranks: Ranks,
        statistics: Statistics,
    ) -> None:
        self.method, self.weights, self.optimizer = method, weights, optimizer
        self.ranks, self._statistics = ranks, statistics
        self.microbatch_loss, self.on_incomplete = microbatch_loss, on_incomplete
        self.scaler = scaler
        noises = [p.perturbation for p in method.passes if p.perturbation is not None]
        self.states: dict[Perturbation, State] = {noise: noise.init(weights) for noise in noises}
        """What each perturbation remembers; equal perturbations of several passes share it."""
        self.step = self.incomplete = 0
        self._hooks: dict[nn.Parameter, Any] = {}
        self._pass: int | None = None
        self._factor = 1.0
        self.got_gradient = False
        self.new_step()

    def new_step(self) -> None:
        self.done: list[int] = []
        """The passes that have run since the last optimizer step."""
        self.by_hooks = True
        self._notes: dict[Perturbation, dict[int, Tensor]] = {noise: {} for noise in self.states}
        self._seen: list[tuple[int, int]] = []

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def several(self) -> bool:
        return len(self.method.passes) > 1

    # ------------------------------------------------------------------ while a pass runs

    def open(self, index: int, factor: float) -> None:
        """Gradients that arrive from now on belong to this pass and are multiplied by `factor`."""
        self._pass, self._factor, self.got_gradient = index, factor, False
        if self.several:
            self._watch_gradients()

    def close(self, *, count: bool) -> None:
        index, self._pass = self._pass, None
        reached = self.got_gradient or not self.several
        # a backward that reached no parameter (for an adversarial input, say) is not a pass
        if count and index is not None and reached:
            self.done.append(index)
            self._seen = self._marks()

    def _watch_gradients(self) -> None:
        """A hook on each leaf weighs the gradient of a pass before it accumulates.

        Registered as parameters come to require gradients: a frozen one refuses a hook.
        """
        slots = {slot.param: number for number, slot in enumerate(self.weights.params)}
        for param in self.params:
            if not is_sharded(param):
                self.watch(param, slots.get(param))

    def watch(self, param: nn.Parameter, slot: int | None) -> None:
        """Weigh the gradients that arrive at this leaf (of a sharded parameter: the gathered one)."""
        if param.requires_grad and param not in self._hooks:
            self._hooks[param] = param.register_hook(partial(self._weigh, slot))

    def _weigh(self, slot: int | None, grad: Tensor) -> Tensor | None:
        if self._pass is None:
            return None
        self.got_gradient = True
        noise = self.method.passes[self._pass].perturbation
        if slot is not None and noise is not None and noise.learns_from == "pass":
            notes = self._notes[noise]
            notes[slot] = noise.collect(grad, notes.get(slot))
        if self._factor == 1:
            return None
        # never `grad * 0`: an overflow in a pass that does not count must not become NaN
        return torch.zeros_like(grad) if self._factor == 0 else grad * self._factor

    def remove_hooks(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def keep_gradients(self) -> list[Tensor | None]:
        """The gradients so far, safe from DDP, which reuses the memory of its bucket views."""
        ddp = self.ranks.ddp
        views = ddp is not None and ddp.gradient_as_bucket_view
        return [p.grad.clone() if views and p.grad is not None else p.grad for p in self.params]

    # ------------------------------------------------------------------ between passes

    def _marks(self) -> list[tuple[int, int]]:
        grads = (p.grad for p in self.params) if self.several else ()
        return [(id(g), g._version) for g in grads if g is not None]

    def new_step_if_abandoned(self) -> None:
        """A pass that starts with all gradients None or zero begins a new step.

        Values are looked at only if somebody wrote the gradients since the last pass, so that an
        ordinary accumulation never waits for the device.
        """
        if not self.done or not self.several:
            return
        grads = [p.grad for p in self.params if p.grad is not None]
        untouched = self._marks() == self._seen
        if not grads or (not untouched and not any(bool(g.any()) for g in grads)):
            self.new_step()

    def stands_still(self) -> bool:
        """Whether all learning rates are 0. A step without a pass is no training step then:
        torch.distributed.checkpoint takes one to allocate a new optimizer's state."""
        return all(float(group.get("lr", 1.0)) == 0 for group in self.optimizer.param_groups)

    # ------------------------------------------------------------------ before the update

    def settle(self) -> None:
        """Everything that must happen between the last backward and the optimizer's update."""
        if not self.method.perturbs:
            return
        if not self.done:
            raise RuntimeError(
                f"optimizer.step() without a pass of {self.method.name}() since the last one: the "
                "attached model was not called in training mode with gradients. Is it in eval mode? "
                "Is an inner module called instead of the one that was attached?"
            )
        self._even_out()
        with torch.no_grad():
            for noise in self.states:
                if noise.learns_from == "step" or (
                    noise.learns_from == "pass" and not self.several
                ):
                    self._learn(noise)
            self._learn_noted()

    def _even_out(self) -> None:
        """See to it that every pass ran equally often; weigh what ran to one otherwise."""
        passes, ran = self.method.passes, Counter(self.done)
        if self.ranks.index is not None or len({ran[i] for i in range(len(passes))}) == 1:
            return
        told = (
            f"{self.method.name}() runs {len(passes)} passes over consecutive micro-batches of one "
            f"optimizer step, but this step had {len(self.done)}."
        )
        if self.step == 0 or self.on_incomplete == "raise":
            batches = ", ".join(f"batch{i + 1}" for i in range(self.method.batches_needed))
            raise RuntimeError(
                f"{told} Accumulate gradients over a multiple of {len(passes)} micro-batches, or "
                f"give each step its batches with perturber.backward(loss_of, {batches})."
            )
        if not self.incomplete:
            warnings.warn(
                f"{told} It and further ones like it are weighted so that the passes present add up "
                "to one; stats() counts them.",
                stacklevel=2,
            )
        self.incomplete += 1
        if self.by_hooks and self.microbatch_loss == "mean":
            share = sum(passes[i].weight for i in self.done) * len(passes) / len(self.done)
        else:
            share = sum(passes[i].weight for i in ran)
        grads = [p.grad for p in self.params if p.grad is not None]
        if share > 0 and grads and not math.isclose(share, 1):
            with torch.no_grad():
                torch._foreach_mul_(grads, 1 / share)

    def _learn(self, noise: Perturbation) -> None:
        """From the gradients as the optimizer sees them; a fused one unscales them by itself."""
        grads = [slot.param.grad if slot.active else None for slot in self.weights.params]
        scale = getattr(self.optimizer, "grad_scale", None)
        scale = 1.0 if scale is None else 1.0 / scale
        noise.learn(self.weights, self.states[noise], grads, scale)

    def _learn_noted(self) -> None:
        """From the K perturbed passes' own gradients, v <- beta v + mean_k ‖g_k‖², each undone of
        its loss divisor and loss scale (its weight was not applied yet when it was noted)."""
        noises = [n for n in self.states if n.learns_from == "pass" and self.several]
        numbers = range(len(self.weights.params))
        notes: list[Gradients] = [[self._notes[n].get(i) for i in numbers] for n in noises]
        planned = [self.method.passes[i].perturbation for i in self.done]
        counts: list[Tensor | float] = [planned.count(noise) for noise in noises]
        if self.ranks.groups and (noises or self._statistics.buffers):
            notes, counts = self._exchange(notes, counts)
        for noise, noted, count in zip(noises, notes, counts, strict=True):
            if isinstance(count, Tensor) or count:
                scale = self._divisor() / count**0.5 / self._loss_scale()
                noise.learn_noted(self.weights, self.states[noise], noted, scale)

    def _exchange(
        self, notes: list[Gradients], counts: list[Tensor | float]
    ) -> tuple[list[Gradients], list[Tensor | float]]:
        """Tell all ranks, in one small message: squared norms, how many, and BN's statistics."""
        like = self.weights.sizes
        vectors = [self.weights.per_filter(noted) for noted in notes]
        parts = [*vectors, like.new_tensor(counts), self._statistics.pack(like)]
        *vectors, total, statistics = self.ranks.sum(*parts)
        self._statistics.unpack(statistics)
        sizes = [slot.filter_count for slot in self.weights.params]
        return [list(vector.split(sizes)) for vector in vectors], list(total)

    def _divisor(self) -> float:
        """By how much the loop divides each micro-batch's loss."""
        if self.microbatch_loss == "sum":
            return 1.0
        if self.by_hooks or self.ranks.index is not None:
            return float(len(self.done))
        return len(self.done) / len(self.method.passes)

    def _loss_scale(self) -> Tensor | float:
        if self.scaler is not None and self.scaler.is_enabled():
            one = torch.ones((), device=self.weights.device)
            return self.scaler.scale(one).to(self.weights.dtype)
        if hasattr(self.optimizer, "grad_scale") or _called_by_scaler():
            raise RuntimeError(
                f"{self.method.name}() reads gradients inside backward, where a GradScaler has them "
                "multiplied by its scale. Tell steppe of it: attach(..., scaler=scaler)."
            )
        return 1.0


def _called_by_scaler() -> bool:
    """Whether a GradScaler is calling the optimizer: the loss was scaled then."""
    frame = sys._getframe(1)
    for _ in range(24):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
            return True
    return False
