"""One optimizer step: which passes ran, how their gradients are weighed, what is learnt from them.

A `Step` is made new for each step of the optimizer and is the only thing that knows about it:

    open -> (pass under way -> open) * n -> settled
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steppe.noise import Gradients
from steppe.passes import Run
from steppe.perturbations import Perturbation, added
from steppe.schedules import OPENING, PERIOD, REST

if TYPE_CHECKING:
    from steppe.training import Training


class Step:
    """The passes of one optimizer step."""

    def __init__(self, training: Training) -> None:
        self._training, number = training, training.number
        self.running: Run | None = None
        self.by_hooks = True
        """Whether the passes run over micro-batches of an unchanged loop; explicit ones otherwise."""
        self.gradient: Gradients = []
        """The gradient of the pass before, for a pass that needs it."""
        self.loss_unscaled = False  # whether one was differentiated without a scaler
        self.settled = self.idle = False  # idle: the optimizer steps without training anything
        self.resting = training.rests and number % REST == 0
        """Whether it runs at the true weights, for BatchNorm's statistics."""
        measured = number <= OPENING or number % PERIOD == 1
        self.metered = training.steered and measured and not self.resting
        """Whether the loss rise is measured."""
        alone = not (training.several or training.ranks.averages)
        self.meters_passes = self.metered and not (alone or training.weights.shards.several)
        """Whether on each pass's own gradient (sharded ones are there as a sum only)."""
        self.pull_is_loss = False
        """Whether nothing but a loss is seen of the model, and its value stands for the pull."""
        self._forget()

    def _forget(self) -> None:
        self.done: list[int] = []
        """The passes that have run."""
        self.notes: dict[Perturbation, Gradients] = {}
        self.slopes: dict[Perturbation, list[Tensor]] = {}
        """<eps, g> of the passes, or of all so far in one where their gradients add up."""
        self.pulls: list[Tensor] = []
        self._frozen_slope: Tensor | float = 0.0
        self._saw_none = False
        """Whether no gradient was there when the last measured backward ended."""
        self._seen: list[tuple[int, int]] = []
        self.touched: set[Tensor] = set()
        """The leaves that gradients arrived at."""

    def open(self, run: Run) -> None:
        """Gradients that arrive from now on belong to this pass."""
        self.running, training = run, self._training
        if run.factor != 1:
            training.leaves.meet_optimizers()
        if (training.several or self.metered) and not self.done:
            training.leaves.meet_ours()
        if (training.several or self.meters_passes) and not run.apart:
            training.leaves.watch_all()
        run.learns = (self.meters_passes and bool(training.weights.moved)) or (
            training.several and run.noise is not None and run.noise.learns_from == "pass"
        )

    def backward_begins(self, run: Run) -> None:
        """The first gradient of a pass is there. Called once a pass, before anything accumulates."""
        run.in_backward = True
        if run.held:
            run.check_kept()
        elif self.abandoned():
            self._forget()  # gradients were thrown away between forward and backward

    def arrive(self, number: int | None, leaf: Tensor, grad: Tensor) -> Tensor | None:
        """A hook on each leaf: keep what the pass learns from, and weigh before it accumulates."""
        run, training = self.running, self._training
        if run is None or run.apart:
            return None
        factor, own = run.factor, run.own
        if training.leaves.late and (factor != 1 or run.scouts):
            training.leaves.check_in_time(leaf)
        if not run.in_backward:
            self.backward_begins(run)
            if factor != 1 and not run.held:  # the model's outputs come first, or all is another's
                queue = torch.autograd.Variable._execution_engine.queue_callback
                queue(run.check_reached)
        run.reached = run.reached or number is not None or leaf in training.leaves.ours
        self.touched.add(leaf)
        if number is not None and run.learns:
            if number not in own:  # to keep `grad` would make autograd copy it
                free = factor == 1 and leaf.grad is None and not training.ranks.averages
                own[number] = None if free else grad
            elif (before := own[number]) is not None:  # a nested backward: it comes in parts
                own[number] = before + grad
        if factor == 1:
            return None
        # never `grad * 0`: an overflow in a pass that does not count must not become NaN
        return torch.zeros_like(grad) if factor == 0 else grad * factor

    def close(self, run: Run) -> None:
        """The backward of a pass came to an end, with its eps still in the weights: it counts."""
        several = self._training.several
        if several and not run.reached:
            return  # a backward that reached no parameter (for an adversarial input) is not a pass
        self._look(run)
        self.done.append(run.index)
        if several or self.metered:
            self._training.leaves.added_up(len(self.done))
            self._seen = self._training.leaves.marks()

    def backward_ends(self, run: Run) -> None:
        """`.grad` is about to become a sum with the gradients of passes before."""
        leaves = self._training.leaves
        for leaf in [late for late in leaves.late if run.scouts and late.grad is not None]:
            leaves.check_in_time(leaf)
        if run.apart:
            run.reached = leaves.have_gradients
            run.own = dict.fromkeys(range(len(self._training.weights.params) * run.learns))
        if run.own:
            self._look(run)

    def _look(self, run: Run) -> None:
        """Take, once, what is learnt from a pass, and let go of its own gradients."""
        if not run.looked_at:
            if self.metered:
                self._meter(run)
            self._note(run)
            run.own, run.looked_at = {}, True

    def _own(self, run: Run) -> list[Tensor | None]:
        """The pass's own gradient of each perturbed parameter."""
        own = run.own
        return [
            None if n not in own else p.param.grad if (grad := own[n]) is None else grad
            for n, p in enumerate(self._training.weights.params)
        ]

    def _meter(self, run: Run) -> None:
        """Measure, while eps is still there, what it did to the loss."""
        weights = self._training.weights
        if run.pull is not None:
            self.pulls.append(run.pull / run.share)
            self._training.sees_outputs = True
        elif run.losses:
            values = [loss.detach().abs().float().sum() for loss in run.losses]
            self.pulls.append(torch.stack(values).sum())
            self.pull_is_loss = True
        if (noise := run.noise) is None or noise.steering is None or not weights.away:
            return
        frozen = weights.frozen.slope(weights.sizes)
        grads = [p.param.grad for p in weights.moved]  # all so far, at this eps
        if self.meters_passes:
            own = dict(zip(weights.params, self._own(run), strict=True))
            grads = [own[p] for p in weights.moved]
        self._saw_none = frozen is None and all(g is None for g in grads)
        groups = self._training.optimizer.param_groups
        if climbing := {p for g in groups if g.get("maximize", False) for p in g["params"]}:
            # what falls there is the objective: its negative is the loss
            pairs = list(zip(weights.moved, grads, strict=True))
            grads = [-g if g is not None and p.param in climbing else g for p, g in pairs]
            if frozen is not None and all(g.get("maximize", False) for g in groups):
                frozen = -frozen
        slope = weights.dot_eps(grads)
        if self.meters_passes:
            slope = slope if frozen is None else slope + frozen
            self.slopes.setdefault(noise, []).append(slope / run.share)
            return
        if frozen is not None:
            self._frozen_slope = self._frozen_slope + frozen
            slope = slope + self._frozen_slope
        self.slopes[noise] = [slope]

    @torch.no_grad()
    def _note(self, run: Run) -> None:
        noise = run.noise
        if noise is None or noise.learns_from != "pass" or not self._training.several:
            return
        new = noise.collect(self._training.weights, self._own(run), 1 / run.share)
        self.notes[noise] = added(self.notes.get(noise, []), new)

    def abandoned(self) -> bool:
        """Whether all gradients are None or zero although passes ran: a new step begins. Values are
        looked at, which waits for the device, only if somebody wrote them since the last pass."""
        if not self.done or not (self._training.several or self.metered):
            return False
        if (marks := self._training.leaves.marks()) == self._seen and marks:
            return False
        return not any(bool(g.any()) for g in self._training.leaves.gradients)

    def settle(self) -> None:
        """Everything that must happen between the last backward and the optimizer's update."""
        training = self._training
        if training.method.perturbs:
            if not self.done:
                raise RuntimeError(
                    f"optimizer.step() without a pass of {training.method.name}() since the last "
                    "one: the attached model was not called in training mode with gradients. Is it "
                    "in eval mode? Is an inner module called instead of the one that was attached? Are "
                    "gradients taken by torch.autograd.grad? With several passes, call backward()."
                )
            self._even_out()
            self._learn()
            training.divisors = [training.divisors[1], self.divisor]
        training.leaves.added_up(len(self.done))
        self.settled = True

    @property
    def unfinished(self) -> bool:
        """Whether gradients are there of some passes without the others."""
        return not (self.settled or self._complete() or self.abandoned())

    def _complete(self) -> bool:
        """Whether every pass of this process ran equally often."""
        mine, passes = self._training.ranks.index, range(len(self._training.method.passes))
        return mine is not None or len({self.done.count(i) for i in passes}) == 1

    def _even_out(self) -> None:
        """See to it that every pass ran equally often; weigh what ran to one otherwise."""
        training = self._training
        if self._complete():
            return
        passes, ran = training.method.passes, Counter(self.done)
        found = (
            f"{training.method.name}() runs {len(passes)} passes over consecutive micro-batches of "
            f"one optimizer step, but this step had {len(self.done)}."
        )
        advice = training.loop.accumulate.format(n=len(passes))
        never = training.incomplete and training.number == training.incomplete
        if never or training.on_incomplete == "raise":
            batches = ", ".join(f"batch{i + 1}" for i in range(training.method.batches_needed))
            raise RuntimeError(
                f"{found} {advice}, or give each step its batches with "
                f"perturber.backward(loss_of, {batches})."
            )
        if not training.incomplete:
            warnings.warn(
                f"{found} It and further ones like it are weighted so that the passes present add "
                f"up to one; stats() counts them. {advice}.",
                stacklevel=2,
            )
        training.incomplete += 1
        if self.by_hooks and training.microbatch_loss == "mean":
            share = sum(passes[i].weight for i in self.done) * len(passes) / len(self.done)
        else:
            share = sum(passes[i].weight for i in ran)
        grads = training.leaves.gradients
        if share > 0 and grads and not math.isclose(share, 1):
            with torch.no_grad():
                torch._foreach_mul_(grads, 1 / share)

    @property
    def divisor(self) -> float:
        """By how much the loop divides each micro-batch's loss."""
        training = self._training
        if training.microbatch_loss == "sum":
            return 1.0
        one_each = self.by_hooks or training.ranks.index is not None
        return len(self.done) / (1 if one_each else len(training.method.passes))

    @torch.no_grad()
    def _learn(self) -> None:
        """Learn from the gradients of a step that is about to be taken."""
        training = self._training
        if self.metered:
            self._steer()
        for noise, state in training.states.items():
            of_pass = noise.learns_from == "pass" and not (training.several or self.resting)
            if noise.learns_from == "step" or of_pass:  # a fused optimizer unscales by itself
                grads = [p.param.grad if p.active else None for p in training.weights.params]
                scale = getattr(training.optimizer, "grad_scale", None)
                noise.learn(training.weights, state, grads, 1.0 if scale is None else 1.0 / scale)
        if training.several and not self.resting:
            self._learn_noted()

    def _learn_noted(self) -> None:
        """From the K perturbed passes' own gradients, v <- beta v + mean_k ‖g_k‖², each undone of
        its loss divisor and loss scale (its weight was undone when it was noted)."""
        training, weights = self._training, self._training.weights
        noises = [n for n in training.states if n.learns_from == "pass"]
        notes = [self.notes.get(noise, [None] * len(weights.params)) for noise in noises]
        planned = [training.method.passes[i].perturbation for i in self.done]
        counts: list[Tensor | float] = [planned.count(noise) for noise in noises]
        statistics = training.statistics
        if training.ranks.groups and (noises or statistics.buffers):
            # all ranks in one small message: squared norms, how many, and BatchNorm's statistics
            vectors = [weights.per_filter(noted) for noted in notes]
            parts = [*vectors, weights.sizes.new_tensor(counts), statistics.pack(weights.sizes)]
            *vectors, total, buffers = training.ranks.sum(*parts)
            statistics.unpack(buffers)
            notes, counts = [weights.per_parameter(v) for v in vectors], list(total)
        for noise, noted, count in zip(noises, notes, counts, strict=True):
            if isinstance(count, Tensor) or count:
                scale = self.divisor / count**0.5 / training.loss_scale()
                noise.learn_noted(weights, training.states[noise], noted, scale)

    def _steer(self) -> None:
        """Let the strength follow the rise that was measured, the mean over passes and ranks."""
        training, weights = self._training, self._training.weights
        if not self.pulls:
            raise RuntimeError(
                f"{training.method.name}(rise=…) follows how hard the loss pulls on the model's outputs, "
                "but the attached model was not called in this step. Call it, or give a fixed strength "
                "(ratio=…)."
            )
        if self._saw_none and training.leaves.have_gradients:
            raise RuntimeError(
                f"{training.method.name}(rise=…) measures the loss rise on the gradients that are in .grad when "
                "backward ends, and none was there (torch.autograd.grad hands them out instead). Call "
                "loss.backward(), or give a fixed strength (ratio=…)."
            )
        scale, number = training.loss_scale(), training.number
        unit = 1.0 if self.pull_is_loss else self.divisor / scale
        pulls = [p.to(weights.sizes) for p in self.pulls]
        sums, counts = [reduce(torch.add, pulls) * unit], [len(pulls)]
        for noise in training.states:
            slopes = self.slopes.get(noise, [])
            total = reduce(torch.add, slopes) if slopes else weights.sizes.new_zeros(())
            sums.append(total * (self._slope_factor(noise) / scale))
            counts.append(len(slopes))
        pull, *found = training.ranks.mean(sums, counts)
        for (noise, state), slope in zip(training.states.items(), found, strict=True):
            if (steering := noise.steering) is not None:
                (memory,) = state["steering"]
                steering.update(memory, slope, pull, number, 1 if number <= OPENING else PERIOD)
                if number > 100 and number % 100 == 1 and not memory.is_meta:
                    training.halvings = steering.warn(memory, number, training.halvings)

    def _slope_factor(self, noise: Perturbation) -> float:
        """What the measured slopes are multiplied by to be those of the loss itself."""
        if self.meters_passes:
            return self.divisor
        training, ranks = self._training, self._training.ranks
        factor = 1.0 if training.microbatch_loss == "mean" else 1 / len(self.done)
        if training.weights.shards.several:  # the mean over replicas, each with a noise of its own
            weight = sum(p.weight for p in training.method.passes if p.perturbation == noise)
            factor *= (ranks.columns if ranks.noise == "rank" else 1) / weight if weight else 0.0
        return factor
