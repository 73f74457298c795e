"""A method at work on a model: what stays from step to step, and who may move the weights when."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steppe.batchnorm import (
    Held,
    SharedStatistics,
    copy_buffers,
    follow_statistics,
    freeze_statistics,
    tracked_norms,
)
from steppe.distributed import Ranks
from steppe.leaves import Leaves
from steppe.methods import Method
from steppe.noise import Draw
from steppe.passes import EARLY, Run
from steppe.perturbations import Perturbation, State
from steppe.schedules import REST
from steppe.step import Step
from steppe.weights import Weights

MicrobatchLoss = Literal["mean", "sum"]
OnIncomplete = Literal["warn", "raise"]

PROBE_STREAM = 4095
"""Noise for `probe`, which must not be the noise of training."""


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
        self.divisors = [1.0, 1.0]
        """By how much the loop divided each loss in the last two steps."""
        self.several, self.steered = len(method.passes) > 1, method.steered
        self.rests = self.steered and not method.has_clean_pass and bool(tracked_norms(model))
        """Whether every `REST`th step runs without eps, and alone updates BatchNorm's statistics:
        those gathered at perturbed weights do not fit the true ones."""
        noises = [p.perturbation for p in method.passes if p.perturbation is not None]
        self.states: dict[Perturbation, State] = {n: n.init(weights) for n in noises}
        """What perturbations remember; equal ones of several passes share it."""
        for noise, state in self.states.items():
            if noise.steering is not None:
                state["steering"] = [noise.steering.init(weights.sizes)]
        self.halvings = 0
        self.fresh: list[bool] = []
        """Of each normalisation layer, whether its statistics held nothing when training began."""
        self.statistics = SharedStatistics(model, method, self.ranks)
        self.signs: list[tuple[int, int, bool]] = []
        """Of the first steps: step, pass, and the sign that all gradients of its output had."""
        self.stepping = 0
        """How deep in the optimizer's step: a subclass may call `super().step()`."""
        self.in_closure = self.probing = False
        self.sees_outputs = False
        """Whether the loss was seen to pull on the model's outputs, and not to be among them."""
        self.holding: Run | None = None
        """The pass that the user holds open (`with run:`), also after its weights were put back."""
        self.leaves = Leaves(self)
        self.step = Step(self)
        self.marks: tuple[object, ...] | None = None
        self._norms: list[float] = []
        self._unaccounted = 0
        self._passed = False
        """Whether a pass ran since the last step of the optimizer."""

    def new_step(self) -> None:
        """Forget the passes since the last optimizer step: what comes belongs to the next one."""
        self.step = Step(self)

    def new_step_if_abandoned(self) -> None:
        """The same where the loop has thrown the gradients of these passes away."""
        if self.step.settled or self.step.abandoned():
            self.new_step()

    def next_pass(self) -> tuple[int, float]:
        """The pass whose turn it is in an unchanged loop, and the factor of its gradients."""
        passes, index = self.method.passes, self.ranks.index
        losses = len(passes)
        if index is None:
            index = min(range(len(passes)), key=self.step.done.count)
            losses = losses if self.microbatch_loss == "mean" else 1
        return index, passes[index].weight * losses

    def begin(self, run: Run) -> None:
        """Put the eps of a pass into the weights and weigh its gradients by its factor."""
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
        self.step.running = run
        try:
            idle = self.rests and run.noise is not None and run.noise.strength(self.number) == 0
            if run.perturbed and self.step.resting and not idle:
                follow_statistics(self.model, run.statistics, self.fresh, self.number // REST)
            elif run.perturbed and not idle:  # rise 0 is the run without steppe
                if self.rests or self.method.has_clean_pass:
                    freeze_statistics(self.model, run.statistics)
                self.move(run.index, self._draw(run.index))
            self.step.open(run)
        except BaseException:
            self.restore()
            raise

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
            return steering.ramp(state) * self.loss_scale() / max(self.divisors)
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

    def restore(self, *, quiet: bool = False) -> None:
        """True weights, bit for bit, and statistics that follow again. Safe at any time."""
        if (run := self.step.running) is not None:
            run.statistics.let_go()  # first: nobody else knows of them
            self.step.running = None
        if self.weights.away:
            try:
                self.weights.restore(quiet=quiet)
            finally:
                self.marks = self.weights.marks()

    def finish(self, run: Run) -> None:
        """The backward of a pass is over: put the weights back and count it."""
        if self.step.running is run:
            try:
                self.weights.frozen.check_ran()
                self.step.close(run)
            finally:
                self.restore()
            self.marks, self._norms, self._passed = self.weights.marks(), self._norms_now(), True

    def _check_accounted(self) -> None:
        """Notice weights that move without a step of the attached optimizer."""
        if not self._passed or self.marks is None:
            return
        before = self.marks, self._norms
        self.marks, self._norms = self.weights.marks(), self._norms_now()
        self._unaccounted += before != (self.marks, self._norms)
        if self._unaccounted > 1:
            raise RuntimeError(
                "The weights were updated twice without a step of the attached "
                f"{type(self.optimizer).__name__}, so every pass would draw the same noise. "
                "Attach the optimizer whose step() updates the weights, and update them by "
                "optimizer.step() alone."
            )

    def _norms_now(self) -> list[float]:
        """Until a step is seen, values are looked at too: what `p.data` writes has no other mark."""
        weights = self.weights
        if self.number or weights.shards.several or weights.sizes.is_meta:
            return []
        return weights.filter_norms().nan_to_num(-1.0).tolist()

    def probe(self, closure: Callable[[], Tensor], samples: int) -> Probe:
        """The loss at the true weights and at `samples` draws, without a trace in the run."""
        passes = self.method.passes
        index = next((i for i, p in enumerate(passes) if p.perturbation is not None), 0)
        noise = passes[index].perturbation
        with self._probing(None), torch.no_grad():
            true = float(closure())
        found = []
        for sample in range(samples):
            if noise is not None and noise.needs_gradient:
                params = [slot.param for slot in self.weights.active]
                with self._probing(None), torch.enable_grad():
                    grads = torch.autograd.grad(closure(), params, allow_unused=True)
                self.step.gradient = list(grads)
            with self._probing(index, sample), torch.no_grad():
                found.append(float(closure()))
        values = torch.tensor(found, dtype=torch.float64)
        stderr = float(values.std() / samples**0.5) if samples > 1 else float("nan")
        return Probe(true, float(values.mean()), stderr, samples)

    @contextmanager
    def _probing(self, index: int | None, sample: int = 0) -> Iterator[None]:
        """The weights of a pass (None: the true ones), the same random numbers every time."""
        with torch.random.fork_rng():
            self.restore()
            held = Held()
            try:
                self.probing = True
                freeze_statistics(self.model, held)
                copy_buffers(self.model, held)
                if index is not None:
                    self.move(index, Draw(self.seed + sample, self.number, PROBE_STREAM))
                yield
                self.weights.frozen.check_ran()
            finally:
                self.probing = False
                held.let_go()
                self.restore()

    @contextmanager
    def running_closure(self) -> Iterator[None]:
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
        """The optimizer has stepped. A step that trained nothing does not count."""
        if not self.step.idle:
            self.number += 1
            self._unaccounted, self._passed = 0, False
        self.marks = None
        self.new_step()

    def loss_scale(self) -> Tensor | float:
        """What the scaler multiplies losses by, on the device; 1 without one."""
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        one = torch.ones((), device=self.weights.device)
        return self.scaler.scale(one).to(self.weights.dtype)

    def compare_losses(self, run: Run, gradient: Tensor) -> None:
        """Warn where micro-batches look like different losses (a discriminator's real and fake):
        in two steps, their gradients have one sign each, and not the same."""
        dense = type(gradient) is Tensor and gradient.layout is torch.strided
        if not dense or gradient.is_meta or gradient.is_complex():
            return
        if gradient.dim() == 0 or gradient.numel() == 0:
            return
        low, high = map(float, gradient.aminmax())
        if low == high == 0 or not (low >= 0 or high <= 0):  # NaN is neither
            return
        self.signs.append((self.number, run.index, high > 0))
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

    def let_go(self) -> None:
        """Forget the model: a perturber that is kept must not keep a DDP object alive."""
        self.leaves.let_go()
        self.statistics.let_go()
        self.ranks.let_go()
        self.weights.free()
        self.model = nn.Module()
