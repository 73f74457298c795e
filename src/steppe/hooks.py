"""Hooks: how an unchanged training loop runs passes.

The attached model's forward, in training mode and with gradients, begins a pass; the end of the
backward over its output ends it; everything else that looks at the weights finds the true ones.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from steppe.engine import Engine, Running
from steppe.layout import is_sharded


class Hook:
    """A hook on a module that is inert in copies and pickles of the module."""

    def __init__(self, owner: Hooks | None, name: str, *first: Any) -> None:
        self.owner, self.name, self.first = owner, name, first

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.owner is not None:
            getattr(self.owner, self.name)(*self.first, *args, **kwargs)

    def __reduce__(self) -> tuple[type[Hook], tuple[Any, ...]]:
        return (Hook, (None, self.name))


class Hooks:
    """All hooks of one engine, installed and removed together."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        model, optimizer = engine.model, engine.ledger.optimizer
        self._handles: list[Any] = [
            # first of all, so that FSDP gathers perturbed weights
            model.register_forward_pre_hook(Hook(self, "before_forward"), prepend=True),
            model.register_forward_hook(Hook(self, "after_forward"), always_call=True),
            optimizer.register_step_pre_hook(engine.before_step),
            optimizer.register_step_post_hook(engine.after_step),
        ]
        look = Hook(self, "before_look")
        if engine.ledger.several and engine.weights.shards.several:
            self._slots = {slot.name: number for number, slot in enumerate(engine.weights.params)}
            self._handles += [
                # after FSDP's own, when the module's parameters are the gathered ones
                module.register_forward_pre_hook(Hook(self, "gathered", name))
                for name, module in model.named_modules()
                if hasattr(module, "reshard")
            ]
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(look))
            self._handles.append(module.register_load_state_dict_pre_hook(look))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._engine.ledger.remove_hooks()
        self._engine.ledger.ranks.widen_sync_batchnorm()

    def gathered(self, prefix: str, module: nn.Module, _: Any) -> None:
        """Weigh the gradients of the gathered parameters: sharded ones see none of autograd."""
        for name, param in module.named_parameters(prefix=prefix):
            if not is_sharded(param):
                self._engine.ledger.watch(param, self._slots.get(name))

    def before_look(self, *_: Any, **__: Any) -> None:
        self._engine.restore()

    def before_forward(self, module: nn.Module, *_: Any) -> None:
        engine, running = self._engine, self._engine.running
        if engine.probing or (running is not None and running.in_backward):
            return  # activation checkpointing runs forwards inside backward
        if not (module.training and torch.is_grad_enabled()):
            engine.restore()
        elif engine.open_run is not None:
            engine.open_run.check_in_place()
        elif running is None and engine.method.perturbs:
            self._begin()

    def _begin(self) -> None:
        engine, method = self._engine, self._engine.method
        if method.repeats_batch:
            raise RuntimeError(
                f"{method.name}() needs {len(method.passes)} passes over the same batch, which "
                "hooks cannot give.\nUse perturber.backward(lambda: loss_fn(model(x), y)) in place "
                "of loss.backward()."
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "The attached model is called inside a backward: a reentrant checkpoint around the "
                "whole model runs its first forward without gradients, at other weights than the "
                "second. Use checkpoint(..., use_reentrant=False)."
            )
        ledger = engine.ledger
        ledger.new_step_if_abandoned()
        index = ledger.ranks.index
        losses = len(method.passes)
        if index is None:
            index = len(ledger.done) % len(method.passes)
            losses = losses if ledger.microbatch_loss == "mean" else 1
        engine.begin(index, method.passes[index].weight * losses)

    def after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        running = self._engine.running
        if running is None or running.run is not None or running.in_backward:
            return
        if output is None and sys.exc_info()[0] is not None:
            self._engine.restore()  # the forward raised
            return
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn]
        if not tensors:
            self._engine.restore()
            raise RuntimeError(
                f"{type(module).__name__} returned no differentiable tensor that steppe can see "
                f"(got {type(output).__name__}), so the end of its backward cannot be told. Return "
                "tensors, or tuples, lists or dictionaries of them, or use perturber.passes()."
            )
        for tensor in tensors:
            tensor.register_hook(partial(self._on_output_gradient, running))

    def _on_output_gradient(self, running: Running, _: Tensor) -> None:
        """Backward has reached an output. Its end is queued from here, not from a parameter's
        hook, which also fires inside the nested backward of reentrant checkpointing."""
        engine = self._engine
        if torch.is_grad_enabled():
            engine.restore()
            raise RuntimeError(
                "create_graph=True differentiates through weights that are put back after backward. "
                "Hold the pass open over both backwards: for run in perturber.passes(): with run: …"
            )
        if engine.running is not running:
            raise RuntimeError(
                "This graph was built at perturbed weights that have been put back since: by another "
                "backward over it, an evaluation, state_dict() or optimizer.step() in between. Run "
                "one backward right after its forward, or hold the pass open over all of it: "
                "for run in perturber.passes(): with run: …"
            )
        if not running.in_backward:
            running.in_backward = True
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(EndOfBackward(engine, running))


class EndOfBackward:
    """Called by autograd when a backward is over. If the backward raised, autograd lets go of it
    instead, and that puts the weights back too."""

    def __init__(self, engine: Engine, running: Running) -> None:
        self._engine, self._running = engine, running

    def __call__(self) -> None:
        self._engine.finish(self._running)

    def __del__(self) -> None:
        if self._engine.running is self._running:
            self._engine.restore()


def is_attached(model: nn.Module) -> bool:
    """Whether the model, a part of it or a wrapper that shares its parts is attached already."""
    hooks = (hook for module in model.modules() for hook in module._state_dict_pre_hooks.values())
    return any(isinstance(hook, Hook) and hook.owner is not None for hook in hooks)
