"""A method at work on a model: what stays from step to step, and who may move the weights when."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from steppe.batchnorm import (
    FollowingStatistics,
    FrozenStatistics,
    SharedStatistics,
    tracked_norms,
)
from steppe.distributed import Ranks
from steppe.leaves import Leaves
from steppe.methods import Method
from steppe.noise import Draw
from steppe.perturbations import Perturbation, State
from steppe.schedules import REST
from steppe.step import EARLY, Running, Step
from steppe.weights import Weights

MicrobatchLoss = Literal["mean", "sum"]
OnIncomplete = Literal["warn", "raise"]


@dataclass(frozen=True)
class Loop:
    """Whose loop trains: what a closure is there, and how errors tell its user what to change."""

    accumulate: str = (
        "Accumulate gradients over a multiple of {n} micro-batches and step when they are complete "
        "((step + 1) % {n} == 0)"
    )
    hold: str = "for run in perturber.passes(): with run: …"
    repeat: str = "perturber.backward(lambda: loss_fn(model(x), y)) in place of loss.backward()"
    outputs: Callable[[Any], Any] | None = None
    """What the loss pulls on, from what the attached model returned; None: that itself."""
    closure: Literal["loss", "loop"] = "loss"
    """A closure given to `optimizer.step`: the loss for all passes, or a piece of an unchanged loop
    whose passes the hooks run (Lightning's is)."""


@dataclass(eq=False, repr=False)
class Training:
    """One method on one model: at most one pass under way at a time."""

    model: nn.Module
    method: Method
    optimizer: torch.optim.Optimizer
    weights: Weights
    ranks: Ranks
    seed: int
    microbatch_loss: MicrobatchLoss
    on_incomplete: OnIncomplete
    scaler: torch.amp.GradScaler | None
    loop: Loop

    def __post_init__(self) -> None:
        model, method, weights = self.model, self.method, self.weights
        self.number = 0
        """Optimizer steps taken since training began."""
        self.incomplete = 0
        """Of these, steps that did not have all passes."""
        self.divisor = 1.0
        """By how much the loop divided each loss in the last step."""
        self.several, self.steered = len(method.passes) > 1, method.steered
        self.perturbs = method.perturbs
        self.rests = self.steered and not method.has_clean_pass and bool(tracked_norms(model))
        """Whether every `REST`th step runs without eps, and alone updates BatchNorm's statistics:
        those gathered at perturbed weights do not fit the true ones."""
        self._freezes = method.has_clean_pass or self.rests
        noises = [p.perturbation for p in method.passes if p.perturbation is not None]
        self.states: dict[Perturbation, State] = {n: n.init(weights) for n in noises}
        """What perturbations remember; equal ones of several passes share it."""
        for noise, state in self.states.items():
            if noise.steering is not None:
                state["steering"] = [noise.steering.init(weights.sizes)]
        self.halvings = 0
        self.statistics = SharedStatistics(model, method, self.ranks)
        self.signs: list[tuple[int, int, bool]] = []
        """Of the first steps: step, pass, and the sign that all gradients of its output had."""
        self.stepping = 0
        """How deep in the optimizer's step: a subclass may call `super().step()`."""
        self.in_closure = self.probing = False
        self.holding: Running | None = None
        """The pass that the user holds open (`with run:`), also after its weights were put back."""
        self.leaves = Leaves(self)
        self.step = Step(self)
        self._marks: tuple[object, ...] | None = None
        self._unaccounted = 0
        self._passed = False
        """Whether a pass ran since the last step of the optimizer."""

    def new_step(self) -> None:
        self.step = Step(self)

    def new_step_if_abandoned(self) -> None:
        if self.step.settled or self.step.abandoned():
            self.new_step()

    def next_pass(self) -> tuple[int, float]:
        """The pass whose turn it is in an unchanged loop, and the factor of its gradients."""
        passes, index = self.method.passes, self.ranks.index
        losses = len(passes)
        if index is None:
            index = len(self.step.done) % len(passes)
            losses = losses if self.microbatch_loss == "mean" else 1
        return index, passes[index].weight * losses

    # ------------------------------------------------------------------ moving the weights

    def begin(
        self,
        index: int,
        factor: float = 1.0,
        *,
        share: float = 1.0,
        held: object = None,
        apart: bool = False,
    ) -> Running:
        """Put the eps of a pass into the weights and weigh its gradients by `factor`."""
        self.restore()
        if self.stepping and not self.in_closure:  # the optimizer's step raised
            self.stepping = 0
            self.new_step()
        self._check_accounted()
        if self.number == 0 and self.steered and self.optimizer.state and not self._passed:
            warnings.warn(
                "The optimizer has taken steps before steppe was attached: a loss rise is ramped by "
                "how much has been learnt since, so the perturbation stays weak. Load the perturber's "
                "state_dict(), or give the rise as a schedule (rise=steppe.constant(0.05)).",
                stacklevel=2,
            )
        running = Running(index, factor, share, held, apart=apart)
        self.step.running = running
        try:
            if self.method.passes[index].perturbation is not None:
                if self.step.resting:
                    running.statistics = FollowingStatistics(self.model, self.number // REST)
                else:
                    if self._freezes:
                        running.statistics = FrozenStatistics(self.model)
                    self.move(index, self._draw(index))
            self.step.open(running)
        except BaseException:
            self.restore()
            raise
        return running

    def _draw(self, index: int) -> Draw:
        planned = self.method.passes[index]
        stream = index if planned.stream is None else planned.stream
        if planned.fresh:
            stream += len(self.method.passes) * self.step.done.count(index)
        return Draw(self.seed, self.number, stream, self.ranks.replica, planned.sign)

    def gain(self, noise: Perturbation) -> Tensor | None:
        """The factor that a steered perturbation's strength has now, on the device."""
        if (steering := noise.steering) is None:
            return None
        (state,) = self.states[noise]["steering"]
        if steering.linear:  # rise / ‖g‖ is in the loss's own unit
            return steering.ramp(state) * self.loss_scale() / self.divisor
        return steering.factor(state)

    def move(self, index: int, draw: Draw) -> None:
        """Back the weights up and add the eps of a pass. Strength zero leaves them untouched."""
        gradient, self.step.gradient = self.step.gradient, []
        noise = self.method.passes[index].perturbation
        if noise is None or noise.strength(draw.step) == 0:
            return
        self.weights.save()
        with torch.no_grad():
            self.weights.gain = self.gain(noise)
            self.weights.frozen.metered = noise.steering is not None and self.step.metered
            noise.move(self.weights, self.states[noise], draw, gradient)
        self.weights.frozen.check_begun(noise)
        self.weights.watch()
        torch.clear_autocast_cache()

    def restore(self, *, quiet: bool = False) -> None:
        """True weights, bit for bit, and statistics that follow again. Safe at any time."""
        running, self.step.running = self.step.running, None
        if running is not None and running.statistics is not None:
            running.statistics.thaw()
        if self.weights.away:
            try:
                self.weights.restore(quiet=quiet)
            finally:
                torch.clear_autocast_cache()
                self._marks = self.weights.marks()

    def finish(self, running: Running) -> None:
        """The backward of a pass is over: put the weights back and count it."""
        if self.step.running is running:
            try:
                self.weights.frozen.check_ran()
                self.step.close(running)
            finally:
                self._marks = None
                self.restore()
            self._marks, self._passed = self._marks or self.weights.marks(), True

    def _check_accounted(self) -> None:
        """Notice weights that move without a step of the attached optimizer."""
        if not self._passed or self._marks is None:
            return
        before, self._marks = self._marks, self.weights.marks()
        self._unaccounted += self._marks != before
        if self._unaccounted > 1:
            raise RuntimeError(
                "The weights were updated twice without a step of the attached "
                f"{type(self.optimizer).__name__}, so every pass would draw the same noise. "
                "Attach the optimizer whose step() updates the weights, and update them by "
                "optimizer.step() alone."
            )

    def forget_marks(self) -> None:
        """Somebody writes the weights who may (`load_state_dict`, the optimizer)."""
        self._marks = None

    @contextmanager
    def probe(self, index: int | None, draw: Draw) -> Iterator[None]:
        """The weights of a pass (None: the true ones) for a look, without a trace in the run."""
        self.restore()
        self.probing = True
        frozen = FrozenStatistics(self.model)
        try:
            if index is not None:
                self.move(index, draw)
            yield
            self.weights.frozen.check_ran()
        finally:
            self.restore()
            frozen.thaw()
            self.probing = False

    # ------------------------------------------------------------------ the optimizer's step

    def step_taken(self) -> None:
        if not self.step.idle:
            self.number += 1
            self._unaccounted, self._passed = 0, False
        self.forget_marks()
        self.new_step()

    def loss_scale(self) -> Tensor | float:
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        one = torch.ones((), device=self.weights.device)
        return self.scaler.scale(one).to(self.weights.dtype)

    def check_scaler(self) -> None:
        """A scaler steps the optimizer: refuse what it would make wrong if nobody announced it."""
        if self.scaler is not None:
            return
        unscaled = self.step.loss_unscaled
        noted = self.several and any(n.learns_from == "pass" for n in self.states)
        if unscaled or noted or self.steered:
            problem = (
                "perturber.backward() did not multiply the loss by its scale"
                if unscaled
                else f"{self.method.name}() reads gradients inside backward, where they are "
                "multiplied by its scale"
            )
            raise RuntimeError(
                f"A GradScaler steps the optimizer, but {problem}. Tell steppe of it: "
                "attach(..., scaler=scaler)."
            )

    def compare_losses(self, running: Running, gradient: Tensor) -> None:
        """Warn where micro-batches look like different losses (a discriminator's real and fake):
        in two steps, their gradients have one sign each, and not the same."""
        if gradient.dim() == 0 or gradient.numel() != gradient.shape[0] or gradient.is_meta:
            return
        low, high = float(gradient.min()), float(gradient.max())
        if low < 0 < high or low == high == 0:
            return
        self.signs.append((self.number, running.index, high > 0))
        steps, passes, signs = (set(column) for column in zip(*self.signs, strict=True))
        by_pass = {entry[1:] for entry in self.signs}
        if len(steps) == EARLY and len(by_pass) == len(passes) and len(signs) == 2:
            warnings.warn(
                "Two backwards of one step look like different losses (their gradients have opposite "
                f"signs), as in a discriminator's loop, but {self.method.name}() takes them for "
                "micro-batches and perturbs the second alone. Run each pass over the whole loss: "
                f"{self.loop.hold}.",
                stacklevel=2,
            )
            self.signs.clear()

    def watch_pull(self, running: Running, output: Any) -> None:
        """Measure how hard the loss pulls on the outputs: for a mean cross-entropy twice the mean of
        1 - p. Models that return their loss beside logits are watched at the logits."""
        if self.loop.outputs is not None:
            output = self.loop.outputs(output)
        if isinstance(output, Mapping) and output.get("logits") is not None:
            output = output["logits"]
        leaves = pytree.tree_leaves(output)
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        outputs = [t for t in tensors if t.numel() > 1]
        for tensor in outputs:
            tensor.register_hook(partial(_add_pull, running))
        self.step.pull_is_loss = not outputs
        if not outputs and tensors:
            running.pull = torch.stack([t.detach().abs().float().sum() for t in tensors]).sum()

    def let_go(self) -> None:
        """Forget the model: a perturber that is kept must not keep a DDP object alive."""
        self.leaves.let_go()
        self.statistics.let_go()
        self.ranks.let_go()
        self.weights.free()
        self.model = nn.Module()


def _add_pull(running: Running, gradient: Tensor) -> None:
    wide = gradient.dtype if gradient.dtype.itemsize >= 4 else torch.float32
    pull = gradient.detach().abs().sum(dtype=wide)
    running.pull = pull if running.pull is None else running.pull + pull
