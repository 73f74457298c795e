"""The engine: puts the eps of a pass into the weights, and always takes it out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from steppe.batchnorm import FrozenStatistics
from steppe.ledger import Ledger
from steppe.methods import Method
from steppe.noise import Draw
from steppe.weights import Weights

Closure = Callable[[], Any]


@dataclass(eq=False)
class Running:
    """A pass under way: its eps is in the weights."""

    index: int
    run: Run | None = None
    """The explicit run it belongs to; None if the model's forward began it."""
    frozen: FrozenStatistics | None = None
    in_backward: bool = False


class Engine:
    """One method at work on one model: at most one pass under way at a time."""

    def __init__(
        self, model: nn.Module, method: Method, weights: Weights, ledger: Ledger, seed: int
    ) -> None:
        self.model, self.method, self.weights, self.ledger = model, method, weights, ledger
        self.seed = seed
        self.running: Running | None = None
        self.open_run: Run | None = None
        self.probing = False
        self.closure_runs_hooks = False
        """Whether a closure given to `optimizer.step` is a piece of an unchanged loop, whose passes
        the hooks run (Lightning's is), instead of the loss for all passes."""
        self._idle = False
        self.gradient: list[Tensor | None] = []
        """The gradient of the pass before, for a pass that needs it."""

    def begin(self, index: int, factor: float, run: Run | None = None) -> Running:
        """Put the eps of a pass into the weights and weigh its gradients by `factor`."""
        self.restore()
        running = self.running = Running(index, run)
        try:
            if self.method.passes[index].perturbation is not None:
                if self.method.has_clean_pass:
                    running.frozen = FrozenStatistics(self.model)
                self.move(index, self._draw(index))
            self.ledger.open(index, factor)
        except BaseException:
            self.restore()
            raise
        return running

    def _draw(self, index: int) -> Draw:
        planned = self.method.passes[index]
        stream = index if planned.stream is None else planned.stream
        if planned.fresh:
            stream += len(self.method.passes) * self.ledger.done.count(index)
        replica = self.ledger.ranks.replica
        return Draw(self.seed, self.ledger.step, stream, replica, planned.sign)

    def move(self, index: int, draw: Draw) -> None:
        """Back the weights up and add the eps of a pass. Strength zero leaves them untouched."""
        gradient, self.gradient = self.gradient, []
        noise = self.method.passes[index].perturbation
        if noise is None or noise.strength(draw.step) == 0:
            return
        self.weights.save()
        with torch.no_grad():
            noise.move(self.weights, self.ledger.states[noise], draw, gradient)
        torch.clear_autocast_cache()

    def restore(self) -> None:
        """True weights, bit for bit, and statistics that follow again. Safe at any time."""
        if self.weights.moved:
            self.weights.restore()
            torch.clear_autocast_cache()
        if self.running is not None:
            if self.running.frozen is not None:
                self.running.frozen.thaw()
            self.ledger.close(count=False)
        self.running = None

    def finish(self, running: Running) -> None:
        """The backward of a pass is over: put the weights back and count it."""
        if self.running is running:
            self.ledger.close(count=True)
            self.restore()

    def release_model(self) -> None:
        """Refer to no module and no process group any longer: a graph or a perturber that outlives
        the training would keep them, and DDP must not outlive its group."""
        del self.model
        self.ledger.ranks = replace(self.ledger.ranks, groups=(), ddp=None)
        self.weights.release_model()

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
        finally:
            self.restore()
            frozen.thaw()
            self.probing = False

    # ------------------------------------------------------------------ hooks of the optimizer

    def before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.restore()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._idle = not self.ledger.done and self.ledger.stands_still()
            if not self._idle:
                self.ledger.settle()
            return None
        ours = self._hooked(closure) if self.closure_runs_hooks else SingleUse(self, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": ours}
        return (args[0], ours, *args[2:]), kwargs

    def _hooked(self, closure: Closure) -> Closure:
        def run() -> Any:
            loss = closure()
            self._idle = loss is None and not self.ledger.done
            if not self._idle:  # a closure that ran no pass and gives no loss skips its step
                self.ledger.settle()
            return loss

        return run

    def after_step(self, *_: Any) -> None:
        if not self._idle:
            self.ledger.step += 1
        self._idle = False
        self.ledger.new_step()


class Run:
    """One pass, entered and left by the user: `with run: loss_fn(model(x), y).backward()`."""

    def __init__(self, engine: Engine, index: int, factor: float) -> None:
        planned = engine.method.passes[index]
        self.index, self.weight = index, planned.weight
        self.perturbed = planned.perturbation is not None
        self._engine, self._factor = engine, factor
        self._scouts = engine.method.scouts(index)
        self._running: Running | None = None
        self._stash: list[Tensor | None] = []
        self._quiet = ExitStack()

    def __repr__(self) -> str:
        kind = "perturbed" if self.perturbed else "clean"
        return f"Run({self.index}, {kind}, weight={self.weight:g})"

    def __enter__(self) -> Run:
        engine = self._engine
        if engine.open_run is not None:
            raise RuntimeError(f"{engine.open_run} is still open; leave it before entering {self}.")
        if self._running is not None:
            raise RuntimeError(f"{self} was entered before; take a new one from passes().")
        noise = engine.method.passes[self.index].perturbation
        if noise is not None and noise.needs_gradient and not engine.gradient:
            raise RuntimeError(f"{self} needs the gradient of the pass before it; run that first.")
        engine.ledger.by_hooks = False
        if self._scouts:
            self._stash = engine.ledger.keep_gradients()
            drop_gradients(engine.ledger)
            self._quiet.enter_context(engine.ledger.ranks.scouting())
        try:
            self._running = engine.begin(self.index, 1.0 if self._scouts else self._factor, self)
            engine.open_run = self
        except BaseException:
            engine.restore()
            self._unstash()
            raise
        return self

    def check_in_place(self) -> None:
        if self._engine.running is not self._running:
            raise RuntimeError(
                f"The weights were put back in the middle of {self}, by an evaluation or "
                "state_dict(). Do that outside of the pass."
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        engine = self._engine
        engine.open_run = None
        try:
            if kind is None:
                self._close()
        finally:
            engine.restore()
            self._unstash()

    def _close(self) -> None:
        self.check_in_place()
        engine, ledger = self._engine, self._engine.ledger
        if ledger.several and not ledger.got_gradient:
            raise RuntimeError(f"No gradient arrived in {self}; call backward() inside of it.")
        assert self._running is not None
        engine.finish(self._running)
        if self._scouts:
            engine.gradient = [slot.param.grad for slot in engine.weights.active]

    def _unstash(self) -> None:
        """Give back the gradients that were there before a pass that shows the next one its way."""
        self._quiet.close()
        if not self._scouts:
            return
        for param, old in zip(self._engine.ledger.params, self._stash, strict=False):
            found, param.grad = param.grad, old
            if self._factor and found is not None:
                param.grad = found * self._factor + (0 if old is None else old)
        self._stash = []


class SingleUse:
    """A closure for `optimizer.step` that runs all passes, once."""

    def __init__(self, engine: Engine, closure: Closure) -> None:
        self._engine, self._closure, self._used = engine, closure, False

    def __call__(self) -> Any:
        method, ledger = self._engine.method, self._engine.ledger
        if self._used:
            raise RuntimeError(
                f"{type(ledger.optimizer).__name__} calls its closure more than once a step, which "
                "weight perturbation cannot serve."
            )
        self._used = True
        if method.feed != "one" or method.m:
            batches = "batch1, batch2" if method.feed == "each" else "batch"
            raise RuntimeError(
                f"{method.name}() cannot take its batches from a closure. Call "
                f"perturber.backward(loss_of, {batches}), then optimizer.step() without one."
            )
        loss = self._run_passes()
        ledger.settle()
        return loss

    def _run_passes(self) -> Any:
        """A closure zeroes gradients and runs backward by itself, so those of earlier passes are
        put aside and added at the end."""
        ledger = self._engine.ledger
        ledger.new_step()
        total: Any = 0.0
        kept: list[Tensor | None] = [None] * len(ledger.params)
        for index, planned in enumerate(self._engine.method.passes):
            drop_gradients(ledger)
            with Run(self._engine, index, planned.weight), torch.enable_grad():
                loss = self._closure()
            for number, param in enumerate(ledger.params):
                kept[number] = _sum(kept[number], param.grad)
            if planned.weight:
                if all(grad is None for grad in kept):
                    raise RuntimeError(
                        "The closure given to optimizer.step() ran no backward, and gradients from "
                        "before it do not count. Let it call loss.backward(), or step without one."
                    )
                total = total + planned.weight * loss
        for param, grad in zip(ledger.params, kept, strict=True):
            param.grad = grad
        return total


def drop_gradients(ledger: Ledger) -> None:
    for param in ledger.params:
        param.grad = None


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
