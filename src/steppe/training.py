"""A method at work on a model: what stays from step to step, and who may move the weights when."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steppe.batchnorm import FollowingStatistics, FrozenStatistics, tracked_norms
from steppe.distributed import Ranks
from steppe.history import History
from steppe.leaves import Leaves
from steppe.methods import Method
from steppe.noise import Draw
from steppe.perturbations import Perturbation
from steppe.step import Running, Step
from steppe.strength import OPENING, PERIOD, REST
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


class Training:
    """One method on one model: at most one pass under way at a time."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        optimizer: torch.optim.Optimizer,
        weights: Weights,
        ranks: Ranks,
        *,
        seed: int,
        microbatch_loss: MicrobatchLoss,
        on_incomplete: OnIncomplete,
        scaler: torch.amp.GradScaler | None,
        loop: Loop,
    ) -> None:
        self.model, self.method, self.optimizer = model, method, optimizer
        self.weights, self.ranks, self.loop, self.scaler = weights, ranks, loop, scaler
        self.microbatch_loss, self.on_incomplete = microbatch_loss, on_incomplete
        self.seed = seed
        self.number = 0
        """Optimizer steps taken since training began."""
        self.incomplete = 0
        self.signs: list[tuple[int, int, bool]] = []
        """Of the first steps: step, pass, and the sign that all gradients of its output had."""
        self.several = len(method.passes) > 1
        self._steered = method.steered
        self.rests = method.steered and not method.has_clean_pass and bool(tracked_norms(model))
        """Whether every `REST`th step runs without eps, and alone updates BatchNorm's statistics:
        those gathered at perturbed weights do not fit the true ones."""
        self.divisor = 1.0
        """By how much the loop divided each loss in the last step."""
        self.history = History(self)
        self.step = Step(self)
        self.pull_is_loss = False
        """Whether nothing but a loss is seen of the model, and its value stands for the pull."""
        self.stepping = 0
        """How deep in the optimizer's step: a subclass may call `super().step()`."""
        self.in_closure = self.probing = False
        self.holding: Running | None = None
        """The pass that the user holds open (`with run:`), also after its weights were put back."""
        self.leaves = Leaves(
            model, optimizer, [slot.param for slot in weights.params], self._arrive
        )
        self._marks: tuple[object, ...] | None = None
        self._unaccounted = 0
        self._passed = False
        """Whether a pass ran since the last step of the optimizer."""

    @property
    def meters_passes(self) -> bool:
        """Whether the rise is measured on each pass's own gradient: those of others add to it, of
        other passes or of other ranks. Sharded gradients are there as a whole only."""
        alone = not self.several and not self.ranks.averages
        return self.metered and not alone and not self.weights.shards.several

    @property
    def adds_passes(self) -> bool:
        """Whether the gradients of passes are put aside for each other and added up by us."""
        ours = not (self.ranks.averages or self.weights.shards.several)
        return ours and not self.leaves.hooked

    def slope_factor(self, noise: Perturbation, step: Step) -> float:
        """What the measured slopes are multiplied by to be those of the loss itself."""
        if self.meters_passes:
            return step.divisor
        factor = 1.0 if self.microbatch_loss == "mean" else 1 / len(step.done)
        if self.weights.shards.several:  # the mean over replicas, each with a noise of its own
            weight = sum(p.weight for p in self.method.passes if p.perturbation == noise)
            own = self.ranks.columns if self.ranks.noise == "rank" else 1
            factor *= own / weight if weight else 0.0
        return factor

    @property
    def perturbs_now(self) -> bool:
        """Whether there is a parameter to perturb: all that were may be frozen by now."""
        return any(p.noisy for p in self.weights.params)

    @property
    def running(self) -> Running | None:
        return self.step.running

    def new_step(self) -> None:
        self.step = Step(self)

    def new_step_if_abandoned(self) -> None:
        if self.step.settled or self.step.abandoned():
            self.new_step()

    def _arrive(self, number: int | None, leaf: Tensor, grad: Tensor) -> Tensor | None:
        return self.step.arrive(number, leaf, grad)

    def next_pass(self) -> tuple[int, float]:
        """The pass whose turn it is in an unchanged loop, and the factor of its gradients."""
        passes, index = self.method.passes, self.ranks.index
        losses = len(passes)
        if index is None:
            index = len(self.step.done) % len(passes)
            losses = losses if self.microbatch_loss == "mean" else 1
        return index, passes[index].weight * losses

    def set_gradients_aside(self) -> dict[Tensor, Tensor | None]:
        """Take all gradients away, to be given back."""
        ddp = self.ranks.ddp
        return self.leaves.set_aside(copy=ddp is not None and ddp.gradient_as_bucket_view)

    # ------------------------------------------------------------------ moving the weights

    def begin(
        self,
        index: int,
        factor: float = 1.0,
        *,
        share: float = 1.0,
        held: str = "",
        apart: bool = False,
    ) -> Running:
        """Put the eps of a pass into the weights and weigh its gradients by `factor`."""
        self.restore()
        if self.stepping and not self.in_closure:  # the optimizer's step raised
            self.stepping = 0
            self.new_step()
        self._check_accounted()
        if self.number == 0 and self.method.steered and self.optimizer.state and not self._passed:
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
                if self.resting:
                    running.frozen = FollowingStatistics(self.model, self.number // REST)
                else:
                    if self.method.has_clean_pass or self.rests:
                        running.frozen = FrozenStatistics(self.model)
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

    @property
    def resting(self) -> bool:
        return self.rests and self.number % REST == 0

    @property
    def metered(self) -> bool:
        """Whether the loss rise is measured in this step: in the first ones, then in some."""
        now = self.number <= OPENING or self.number % PERIOD == 1
        return self._steered and now and not self.resting

    def gain(self, noise: Perturbation) -> Tensor | None:
        """The factor that a steered perturbation's strength has now, on the device."""
        if (steering := noise.steering) is None:
            return None
        (state,) = self.history.states[noise]["steering"]
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
            self.weights.frozen.metered = noise.steering is not None and self.metered
            noise.move(self.weights, self.history.states[noise], draw, gradient)
        self.weights.frozen.check_begun(noise)
        self.weights.watch()
        torch.clear_autocast_cache()

    def restore(self, *, quiet: bool = False) -> None:
        """True weights, bit for bit, and statistics that follow again. Safe at any time."""
        running = self.running
        self.step.close(count=False)
        if running is not None and running.frozen is not None:
            running.frozen.thaw()
        if self.weights.away:
            try:
                self.weights.restore(quiet=quiet)
            finally:
                torch.clear_autocast_cache()
                self._marks = self.weights.marks()

    def finish(self, running: Running) -> None:
        """The backward of a pass is over: put the weights back and count it."""
        if self.running is running:
            frozen, running.frozen = running.frozen, None
            try:
                self.weights.frozen.check_ran()
                self.step.close(count=True)
            finally:
                if frozen is not None:
                    frozen.thaw()
                self._marks = None
                self.restore()
            self._marks, self._passed = self._marks or self.weights.marks(), True

    def _check_accounted(self) -> None:
        """Notice weights that move without a step of the attached optimizer."""
        marks = self.weights.marks()
        if self._passed and self._marks is not None and marks != self._marks:
            self._unaccounted += 1
            if self._unaccounted > 1:
                raise RuntimeError(
                    "The weights were updated twice without a step of the attached "
                    f"{type(self.optimizer).__name__}, so every pass would draw the same noise. "
                    "Attach the optimizer whose step() updates the weights, and update them by "
                    "optimizer.step() alone."
                )
        self._marks = marks

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

    @contextmanager
    def closure(self) -> Iterator[None]:
        """Around a closure that the optimizer calls: passes within its step are its own."""
        self.in_closure = True
        try:
            yield
        except BaseException:
            self.stepping = 0
            self.new_step()
            raise
        finally:
            self.in_closure = False

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
        """A scaler nobody announced is about to step: refuse what it would make wrong."""
        if self.scaler is not None:
            return
        noted = self.several and any(n.learns_from == "pass" for n in self.history.states)
        reads = noted or self.method.steered
        if self.step.loss_unscaled or reads:
            problem = (
                "perturber.backward() did not multiply the loss by its scale"
                if self.step.loss_unscaled
                else f"{self.method.name}() reads gradients inside backward, where they are "
                "multiplied by its scale"
            )
            raise RuntimeError(
                f"A GradScaler steps the optimizer, but {problem}. Tell steppe of it: "
                "attach(..., scaler=scaler)."
            )

    def let_go(self) -> None:
        """Forget the model: a perturber that is kept must not keep a DDP object alive."""
        self.leaves.let_go()
        self.ranks.let_go()
        self.weights.free()
        self.model = nn.Module()
