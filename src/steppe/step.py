"""One optimizer step: which passes ran, how their gradients are weighed, what they noted.

A `Step` is made new for each step of the optimizer and is the only thing that knows about it:

    open -> (pass under way -> open) * n -> settled

`Training` replaces it when the optimizer has stepped, or when its gradients were thrown away.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steppe.batchnorm import FollowingStatistics, FrozenStatistics
from steppe.perturbations import Gradients, Perturbation

if TYPE_CHECKING:
    from steppe.training import Training

EARLY = 2
"""Steps in which everything is looked at twice, also what costs a wait for the device."""


@dataclass(eq=False)
class Running:
    """A pass under way: its eps is in the weights, and the gradients that arrive are its own."""

    index: int
    factor: float = 1.0
    """What its gradients are multiplied by as they arrive at the leaves."""
    share: float = 1.0
    """What they are multiplied by already, through the loss."""
    held: str = ""
    """What the user holds open (`with run:`); empty where the model's forward began the pass."""
    frozen: FrozenStatistics | FollowingStatistics | None = None
    in_backward: bool = False
    end_is_queued: bool = False
    reached: bool = False
    """Whether a gradient arrived at any leaf."""
    own: dict[int, Tensor] = field(default_factory=dict)
    """Its own gradients by the number of the parameter, where its perturbation learns from them."""
    pull: Tensor | None = None
    """The sum of |dL/dz| over the model's outputs, where a rise is steered by it."""
    of_loss: bool = False
    """Whether the outputs are a loss alone, and `pull` is its value."""
    alone: set[int] = field(default_factory=set)
    """Parameters whose `.grad` is its own gradient: there was none before."""
    apart: bool = False
    """Whether all gradients are its own at the end of its backward, so that none is looked at as it
    arrives."""
    learns: bool = False
    """Whether something is learnt from its own gradients."""


class Step:
    """The passes of one optimizer step."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.done: list[int] = []
        """The passes that have run."""
        self.running: Running | None = None
        self.by_hooks = True
        """Whether the passes run over micro-batches of an unchanged loop; explicit ones otherwise."""
        self.gradient: list[Tensor | None] = []
        """The gradient of the pass before, for a pass that needs it."""
        self.loss_unscaled = False
        """Whether a loss was differentiated here without a scaler."""
        self.settled = False
        self.idle = False
        """Whether the optimizer steps without training anything."""
        self.notes: dict[Perturbation, Gradients] = {}
        self.slopes: dict[Perturbation, list[Tensor]] = {}
        """<eps, g> of the passes, or of all so far in one where their gradients add up."""
        self.pulls: list[Tensor] = []
        self._frozen_slope: Tensor | float = 0.0
        self._seen: list[tuple[int, int]] = []

    # ------------------------------------------------------------------ while a pass runs

    def open(self, running: Running) -> None:
        """Gradients that arrive from now on belong to this pass."""
        self.running = running
        training = self._training
        if running.factor != 1:
            training.leaves.meet_optimizers()
        if (training.several or training.meters_passes) and not running.apart:
            training.leaves.watch_all()
        noise = training.method.passes[running.index].perturbation
        running.learns = (
            training.several and noise is not None and noise.learns_from == "pass"
        ) or (training.meters_passes and bool(training.weights.moved))

    def backward_begins(self, running: Running) -> None:
        """The first gradient of a pass is there. Called once a pass, before anything accumulates."""
        running.in_backward = True
        if not running.held and self.abandoned():
            # the gradients of the passes before were thrown away between forward and backward
            self.done, self.notes, self.slopes, self.pulls = [], {}, {}, []

    def arrive(self, number: int | None, leaf: Tensor, grad: Tensor) -> Tensor | None:
        """A hook on each leaf: keep what the pass learns from, and weigh before it accumulates."""
        running = self.running
        if running is None or running.apart:
            return None
        if not running.in_backward:
            self.backward_begins(running)
        running.reached = True
        factor = running.factor
        if number is not None and running.learns:
            if number in running.own:  # a nested backward: the gradient comes in parts
                running.own[number] = running.own[number] + grad
            elif number not in running.alone:
                if factor == 1 and leaf.grad is None and not self._training.ranks.averages:
                    running.alone.add(number)  # to keep `grad` would make autograd copy it
                else:
                    running.own[number] = grad
        if factor == 1:
            return None
        # never `grad * 0`: an overflow in a pass that does not count must not become NaN
        return torch.zeros_like(grad) if factor == 0 else grad * factor

    def close(self, *, count: bool) -> None:
        """The pass is over; it counts if its backward came to an end."""
        running, self.running = self.running, None
        if running is None:
            return
        # a backward that reached no parameter (for an adversarial input, say) is not a pass
        if count and (running.reached or not self._training.several):
            if self._training.metered:
                self._meter(running)
            if self._training.several and (running.own or running.alone):
                self._note(running)
            self.done.append(running.index)
            self._seen = self._marks()

    def keep_own(self) -> None:
        """Keep the pass's own gradients where `.grad` is about to become a sum with those before."""
        running, params = self.running, self._training.weights.params
        if running is None:
            return
        if running.apart:
            running.reached = any(leaf.grad is not None for leaf in self._training.leaves)
            running.alone = set(range(len(params))) if running.learns else set()
        kept = {number: params[number].param.grad for number in running.alone}
        running.own |= {number: grad for number, grad in kept.items() if grad is not None}
        running.alone.clear()

    def _own(self, running: Running) -> list[Tensor | None]:
        """The pass's own gradient of each perturbed parameter."""
        return [
            p.param.grad if number in running.alone else running.own.get(number)
            for number, p in enumerate(self._training.weights.params)
        ]

    def _meter(self, running: Running) -> None:
        """Measure, while eps is still there, what it did to the loss."""
        training, weights = self._training, self._training.weights
        if running.pull is not None:
            self.pulls.append(running.pull if running.of_loss else running.pull / running.share)
        noise = training.method.passes[running.index].perturbation
        if noise is None or noise.steering is None or not weights.away:
            return
        frozen = weights.frozen.slope(weights.sizes)
        if training.meters_passes:
            own = dict(zip(weights.params, self._own(running), strict=True))
            slope = weights.dot_eps([own[p] for p in weights.moved])
            slope = slope if frozen is None else slope + frozen
            self.slopes.setdefault(noise, []).append(slope / running.share)
        else:  # what has accumulated so far, all of it at this eps
            slope = weights.dot_eps([p.param.grad for p in weights.moved])
            if frozen is not None:
                self._frozen_slope = self._frozen_slope + frozen
                slope = slope + self._frozen_slope
            self.slopes[noise] = [slope]

    def _note(self, running: Running) -> None:
        training = self._training
        noise = training.method.passes[running.index].perturbation
        if noise is None or noise.learns_from != "pass":
            return
        grads = self._own(running)
        with torch.no_grad():
            if running.share != 1:  # undo what was multiplied into the loss
                there = iter(
                    torch._foreach_mul([g for g in grads if g is not None], 1 / running.share)
                )
                grads = [None if g is None else next(there) for g in grads]
            noted = self.notes.get(noise, [])
            self.notes[noise] = noise.collect(training.weights, grads, noted)

    def compare_losses(self, running: Running, gradient: Tensor) -> None:
        """Warn where micro-batches look like different losses (a discriminator's real and fake):
        in two steps, their gradients have one sign each, and not the same."""
        if gradient.dim() == 0 or gradient.numel() != gradient.shape[0] or gradient.is_meta:
            return
        low, high = float(gradient.min()), float(gradient.max())
        if low < 0 < high or low == high == 0:
            return
        signs = self._training.signs
        signs.append((self._training.number, running.index, high > 0))
        steps, passes, _ = (set(column) for column in zip(*signs, strict=True))
        by_pass = {(index, sign) for _, index, sign in signs}
        if (
            len(steps) == EARLY
            and len(by_pass) == len(passes)
            and len({s for _, s in by_pass}) == 2
        ):
            name = self._training.method.name
            warnings.warn(
                f"Two backwards of one step look like different losses (their gradients have "
                f"opposite signs), as in a discriminator's loop, but {name}() takes them for "
                "micro-batches and perturbs the second alone. Run each pass over the whole loss: "
                f"{self._training.loop.hold}.",
                stacklevel=2,
            )
            signs.clear()

    # ------------------------------------------------------------------ between passes

    def _marks(self) -> list[tuple[int, int]]:
        if not self._training.several:
            return []
        return [(id(g), g._version) for g in self._training.leaves.gradients]

    def abandoned(self) -> bool:
        """Whether all gradients are None or zero although passes ran: a new step begins.

        Values are looked at only if somebody wrote the gradients since the last pass, so that an
        ordinary accumulation never waits for the device.
        """
        if not self.done or not self._training.several:
            return False
        grads = self._training.leaves.gradients
        untouched = self._marks() == self._seen
        return not grads or (not untouched and not any(bool(g.any()) for g in grads))

    # ------------------------------------------------------------------ before the update

    def settle(self) -> None:
        """Everything that must happen between the last backward and the optimizer's update."""
        training = self._training
        if training.method.perturbs:
            if not self.done:
                raise RuntimeError(
                    f"optimizer.step() without a pass of {training.method.name}() since the last "
                    "one: the attached model was not called in training mode with gradients. Is it "
                    "in eval mode? Is an inner module called instead of the one that was attached?"
                )
            self._even_out()
            training.history.learn(self)
            training.divisor = self.divisor
        self.settled = True

    def _even_out(self) -> None:
        """See to it that every pass ran equally often; weigh what ran to one otherwise."""
        training = self._training
        passes, ran = training.method.passes, Counter(self.done)
        if training.ranks.index is not None or len({ran[i] for i in range(len(passes))}) == 1:
            return
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
        if self.by_hooks or training.ranks.index is not None:
            return float(len(self.done))
        return len(self.done) / len(training.method.passes)


def put_back(run: str) -> str:
    """What is said of a pass whose weights somebody put back."""
    return (
        f"The weights were put back in the middle of {run}, by an evaluation or state_dict(). Do that "
        "outside of the pass."
    )
