"""Lightning: `Trainer(callbacks=[Perturb(steppe.arwp())])`.

A LightningModule calls what it likes inside `training_step` (`self.net(x)` rather than itself), so
what is attached is the training step as a whole: a pass begins when the strategy is asked for it and
ends with its backward. Methods that need a batch twice (SAM) run their further passes right after
Lightning's own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from steppe.attaching import attach
from steppe.integrations.loops import begin, checked, fill_in_length
from steppe.methods import Method
from steppe.passes import Run
from steppe.perturber import Perturber
from steppe.standins import Hook
from steppe.training import Loop

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ImportError as error:
        raise ImportError(
            "steppe.integrations.lightning needs Lightning. Install it with "
            "pip install 'steppe[lightning]'."
        ) from error

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


LOOP = Loop(
    accumulate="Set Trainer(accumulate_grad_batches={n}), or a multiple of it",
    hold="automatic_optimization = False with perturber.passes()",
    repeat="steppe.integrations.lightning.Perturb with automatic optimization",
    closure="loop",
)


class Perturb(Callback):
    """Train with a method of steppe's under Lightning's automatic optimization.

    Args:
        method: `steppe.arwp()`, `steppe.m_arwp(0.015)`, `steppe.sam(0.05)`, … or by name, as
            LightningCLI gives it: "arwp:ratio=0.1". A schedule without a length
            (`cosine_increase(0, 0.01)`) gets the Trainer's.
        options: of `steppe.attach`: seed, exclude, on_incomplete, passes_over, noise, ascent.

    `perturber` is the perturber at work; its state is saved in Lightning's checkpoints.
    """

    def __init__(self, method: Method | str, **options: Any) -> None:
        self.method, self.options = checked(method, options), options
        self.perturber: Perturber | None = None
        self._saved: dict[str, Any] = {}
        self._rerouted: dict[str, Any] | None = None
        self._passes: Iterator[Run] = iter(())
        self._open = ExitStack()

    # ------------------------------------------------------------------ attach and detach

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not pl_module.automatic_optimization:
            raise RuntimeError(
                "Perturb() needs automatic optimization, but this LightningModule sets "
                "automatic_optimization = False. Leave the callback out and attach by hand: "
                "in on_train_start, self.perturber = steppe.attach(self.net, "
                "self.optimizers(use_pl_optimizer=False), method); in training_step, "
                "self.perturber.backward(loss_of, batch) and a step of that optimizer."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()
        if len(trainer.optimizers) != 1:
            raise RuntimeError(
                f"Perturb() needs one optimizer, but configure_optimizers gave "
                f"{len(trainer.optimizers)}."
            )
        ask = "Trainer(max_epochs=..., max_steps=...)"
        method = fill_in_length(self.method, lambda: trainer.estimated_stepping_batches, ask)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._step = Step(trainer.strategy)
        loop = replace(LOOP, outputs=self._step.watch_outputs()) if method.steered else LOOP
        optimizer = trainer.optimizers[0]
        self.perturber = attach(
            self._step, optimizer, method, scaler=scaler, loop=loop, **self.options
        )
        accumulated, setting = trainer.accumulate_grad_batches, "Trainer(accumulate_grad_batches"
        begin(self.perturber, trainer.global_step, self._saved, accumulated, setting)
        # Until detached, the strategy's training step and backward go through the callback.
        self._rerouted = vars(trainer.strategy)
        self._backward_once = trainer.strategy.backward
        self._rerouted["training_step"] = self._training_step
        if self.method.repeats_batch:
            self._rerouted["backward"] = partial(self._backward, trainer)

    def _detach(self) -> None:
        """Leave trainer and model as they were; the perturber stays for a look and its state."""
        if self.perturber is not None and self._rerouted is not None:
            self._put_back()
            for name in ("training_step", "backward"):
                self._rerouted.pop(name, None)
            self._step.let_go()
            self.perturber.detach()
            self._saved = self.perturber.state_dict()
        self._rerouted = None

    def _put_back(self) -> None:
        """True weights, also after a training step whose loss was thrown away."""
        abandoned = RuntimeError("the training step was abandoned")
        self._open.__exit__(RuntimeError, abandoned, None)
        self._passes = iter(())
        if self.perturber is not None:
            self.perturber.restore()

    # ------------------------------------------------------------------ the training step

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for `strategy.training_step`."""
        assert self.perturber is not None
        self._again = partial(self._step, *args, **kwargs)
        try:
            if self.method.repeats_batch:
                self._passes = self.perturber.passes()
                self._open.enter_context(next(self._passes))
            return self._again()
        except Skipped:
            self._put_back()
            return None
        except BaseException:
            self._put_back()
            raise

    def _backward(self, trainer: Trainer, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Stands in for `strategy.backward` where a batch serves several passes: Lightning's own
        backward is that of the first, and the further ones follow."""
        try:
            self._backward_once(loss, *args, **kwargs)
            for run in self._passes:
                self._open.enter_context(run)
                with quiet(trainer.lightning_module):
                    output = self._again()
                loss = output["loss"] if isinstance(output, Mapping) else output
                self._backward_once(loss / trainer.accumulate_grad_batches, *args, **kwargs)
        except BaseException:
            self._put_back()
            raise

    def on_after_backward(self, *_: Any) -> None:
        self._open.close()

    def on_train_batch_start(self, trainer: Trainer, _: Any, batch: Any, batch_idx: int) -> None:
        """Lightning zeroes gradients only after the forward of a step's first micro-batch, so the
        perturber learns here that those still there are of the step before."""
        assert self.perturber is not None
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.perturber.new_step(drop_gradients=self.method.repeats_batch)

    # ------------------------------------------------------------------ whoever looks next

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._put_back()

    def on_validation_start(self, *_: Any) -> None:
        self._put_back()

    def on_train_end(self, *_: Any) -> None:
        self._detach()

    def on_exception(self, *_: Any) -> None:
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        return self._saved if self._rerouted is None else self.perturber.state_dict()  # type: ignore[union-attr]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict


class Skipped(Exception):  # noqa: N818 - not an error: a training step may return None
    """The training step returned None: Lightning skips the batch."""


class Step(nn.Module):
    """The strategy's training step as a module, which is what steppe attaches to."""

    only_wraps = True

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.module = strategy.lightning_module  # first: parameters go by its names for them
        if strategy.model is not strategy.lightning_module:
            self.wrapper = strategy.model
        self._run = strategy.training_step
        self._handles: list[Any] = []
        self._depth, self._last = 0, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._depth, self._last = 0, None
        output = self._run(*args, **kwargs)
        if output is None:
            raise Skipped
        return output

    def watch_outputs(self) -> Callable[[Any], Any]:
        """A training step returns its loss alone: what that pulls on is the output of the last part
        of the module that it called, if it is not a loss too."""
        for part in self.module.children():
            self._handles += [
                part.register_forward_pre_hook(Hook(self, "before_part")),
                part.register_forward_hook(Hook(self, "after_part")),
            ]
        return lambda loss: loss if self._last is None else self._last

    def before_part(self, *_: Any) -> None:
        self._depth += 1

    def after_part(self, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if self._depth == 0 and any(t.numel() > 1 and t.requires_grad for t in tensors):
            self._last = output

    def let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._last = [], None


@contextmanager
def quiet(module: Any) -> Iterator[None]:
    """What a repeated training step logs would count its batch twice."""
    vars(module)["log"] = lambda *_, **__: None
    try:
        yield
    finally:
        del vars(module)["log"]
