"""Hooks: how an unchanged training loop runs passes.

A call of the attached model, in training mode and with gradients, begins a pass; the end of the
backward over its output ends it; everything else that looks at the weights finds the true ones.

Nothing of it is part of the model: copies and pickles of an attached model are made from its state
without any of this, at the true weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from steppe.intercept import ASKS, STATE, Call, Hook, ScalerAsks, State
from steppe.layout import is_sharded
from steppe.passes import LoopClosure, LossClosure
from steppe.step import EARLY, Running, put_back
from steppe.training import Training


class Hooks:
    """All hooks of one training, installed and removed together."""

    def __init__(self, training: Training) -> None:
        self._training = training
        model, optimizer = training.model, training.optimizer
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        ]
        self._asks = ScalerAsks(getattr(optimizer, ASKS, False))
        vars(optimizer)[ASKS] = self._asks
        self._call = Call(self, model)
        # a module without weights may be a part of several models
        self._modules = [m for m in model.modules() if next(m.parameters(), None) is not None]
        gather = training.several and training.weights.shards.several
        for module in self._modules:
            vars(module)[STATE] = State(self, module)
            self._handles += [
                module.register_state_dict_pre_hook(Hook(self, "before_look")),
                module.register_load_state_dict_pre_hook(Hook(self, "before_load")),
            ]
            if gather and hasattr(module, "reshard"):
                # after FSDP's own, when the module's parameters are the gathered ones
                hook = module.register_forward_pre_hook(Hook(self, "gathered"))
                self._handles.append(hook)
        training.weights.frozen.install()
        perturbed = {slot.param: number for number, slot in enumerate(training.weights.params)}
        self._owners = [
            (module, name, param, perturbed[param])
            for module in self._modules
            for name, param in module._parameters.items()
            if param is not None and param in perturbed
        ]

    def remove(self) -> None:
        """Leave model and optimizer as they were, and no reference to either."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            vars(module).pop(STATE, None)
        self._training.weights.frozen.remove()
        self._call.remove()
        vars(self._training.optimizer).pop(ASKS, None)
        if self._asks._answer:
            setattr(self._training.optimizer, ASKS, True)
        self._handles, self._modules, self._owners = [], [], []
        del self._call

    # ------------------------------------------------------------------ whoever looks or writes

    def before_look(self, *_: Any, **__: Any) -> None:
        self._training.restore()

    def before_load(self, *_: Any, **__: Any) -> None:
        self._training.restore()
        self._training.forget_marks()

    def gathered(self, module: nn.Module, _: Any) -> None:
        """Weigh the gradients of the gathered parameters: sharded ones see none of autograd."""
        inside = set(module.modules())
        for owner, name, _param, number in self._owners:
            if owner in inside:
                param = owner._parameters[name]
                if param is not None and not is_sharded(param):
                    self._training.leaves.watch(param, number)

    # ------------------------------------------------------------------ the model's forward

    @_disable_dynamo
    def before_forward(self, module: nn.Module) -> None:
        training, running = self._training, self._training.running
        if training.probing:
            return
        grad = torch.is_grad_enabled()
        if (held := training.holding) is not None:
            if not (module.training or grad):
                training.restore()
            elif running is not held:
                raise RuntimeError(put_back(held.held))
            return
        if running is not None and running.in_backward:
            return  # activation checkpointing runs forwards inside backward
        if not (module.training and grad) or not training.perturbs_now:
            training.restore()
        elif running is not None:
            if training.weights.written():
                training.restore()  # which raises
        elif training.method.perturbs:
            self._check_own_weights()
            self._begin()

    def _check_own_weights(self) -> None:
        for owner, name, param, _ in self._owners:
            if owner._parameters.get(name) is not param and not is_sharded(param):
                raise RuntimeError(
                    f"The attached model runs with another {name} than the one that was attached "
                    "(torch.func.functional_call with other weights; a parametrization or a move to "
                    "another device since). "
                    "Hold the pass open over what is made of the model's own weights: "
                    f"{self._training.loop.hold}. Or attach again."
                )

    def _begin(self) -> None:
        training, method = self._training, self._training.method
        if method.repeats_batch:
            raise RuntimeError(
                f"{method.name}() needs {len(method.passes)} passes over the same batch, which "
                f"hooks cannot give.\nUse {training.loop.repeat}."
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(_inside_a_backward(training.loop.hold))
        training.new_step_if_abandoned()
        training.begin(*training.next_pass())

    def forward_failed(self) -> None:
        running = self._training.running
        if running is not None and not running.held and not running.in_backward:
            self._training.restore()

    @_disable_dynamo
    def after_forward(self, module: nn.Module, output: Any) -> None:
        training, running = self._training, self._training.running
        if running is None or (running.in_backward and not running.held):
            return
        if training.metered:
            self._watch_pull(running, output)
        if running.held:
            return
        leaves = pytree.tree_leaves(output)
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.grad_fn]
        if not tensors:
            self._training.restore()
            raise RuntimeError(
                f"{type(module).__name__} returned no differentiable tensor that steppe can see "
                f"(got {type(output).__name__}), so the end of its backward cannot be found. Return "
                f"tensors, or tuples, lists or dictionaries of them, or use {self._training.loop.hold}."
            )
        for tensor in tensors:
            tensor.register_hook(partial(self._on_output_gradient, running))

    def _watch_pull(self, running: Running, output: Any) -> None:
        """Measure how hard the loss pulls on the outputs: for a mean cross-entropy twice the mean of
        1 - p. Models that return their loss beside logits are watched at the logits."""
        training = self._training
        if training.loop.outputs is not None:
            output = training.loop.outputs(output)
        if isinstance(output, Mapping) and output.get("logits") is not None:
            output = output["logits"]
        leaves = pytree.tree_leaves(output)
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        outputs = [t for t in tensors if t.numel() > 1]
        for tensor in outputs:
            tensor.register_hook(partial(_pull, running))
        training.pull_is_loss = running.of_loss = not outputs
        if not outputs and tensors:
            running.pull = torch.stack([t.detach().abs().float().sum() for t in tensors]).sum()

    def _on_output_gradient(self, running: Running, gradient: Tensor) -> None:
        """Backward has reached an output. Its end is queued from here, not from a parameter's
        hook, which also fires inside the nested backward of reentrant checkpointing."""
        training = self._training
        if torch.is_grad_enabled():
            training.restore()
            raise RuntimeError(
                "create_graph=True differentiates through weights that are put back after backward. "
                f"Hold the pass open over both backwards: {training.loop.hold}"
            )
        if training.running is not running:
            raise RuntimeError(
                "This graph was built at perturbed weights that have been put back since: by another "
                "backward over it, an evaluation, state_dict() or optimizer.step() in between. Run "
                "one backward right after its forward, or hold the pass open over all of it: "
                f"{training.loop.hold}"
            )
        if not running.in_backward:
            training.step.backward_begins(running)
        if not running.end_is_queued:
            running.end_is_queued = True
            if training.several and training.ranks.index is None and training.number < EARLY:
                training.step.compare_losses(running, gradient)
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(EndOfBackward(training, running))

    # ------------------------------------------------------------------ the optimizer's step

    def before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        training = self._training
        scaled, self._asks.asked = self._asks.asked, False
        if training.stepping:
            training.stepping += 1
            return None
        training.restore()
        training.leaves.notice_added()
        if scaled:
            training.check_scaler()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        step = training.step
        if closure is None:
            step.idle = not step.done and _stands_still(training.optimizer)
            if not step.idle:
                step.settle()
            training.stepping = 1
            return None
        training.stepping = 1
        kind = LossClosure if training.loop.closure == "loss" else LoopClosure
        ours = kind(training, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": ours}
        return (args[0], ours, *args[2:]), kwargs

    def after_step(self, *_: Any) -> None:
        self._training.stepping = max(0, self._training.stepping - 1)
        if not self._training.stepping:
            self._training.step_taken()


def _stands_still(optimizer: Optimizer) -> bool:
    """Whether all learning rates are 0. A step without a pass is no training step then:
    torch.distributed.checkpoint takes one to allocate a new optimizer's state."""
    return all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)


def _pull(running: Running, gradient: Tensor) -> None:
    wide = gradient.dtype if gradient.dtype.itemsize >= 4 else torch.float32
    pull = gradient.detach().abs().sum(dtype=wide)
    running.pull = pull if running.pull is None else running.pull + pull


def _inside_a_backward(hold: str) -> str:
    node = torch._C._current_autograd_node()
    if node is not None and "Checkpoint" in node.name():
        return (
            "The attached model is called inside a backward: a reentrant checkpoint around the whole "
            "model runs its first forward without gradients, at other weights than the second. Use "
            "checkpoint(..., use_reentrant=False)."
        )
    return (
        "The attached model is called inside a backward, by a loss that runs it again with gradients "
        f"(gradient caching does). Hold the pass open over all of it: {hold}."
    )


class EndOfBackward:
    """Called by autograd when a backward is over. If the backward raised, autograd lets go of it
    instead, and that puts the weights back too."""

    def __init__(self, training: Training, running: Running) -> None:
        self._training, self._running = training, running

    def __call__(self) -> None:
        self._training.finish(self._running)

    def __del__(self) -> None:
        if self._training.running is self._running:
            self._training.restore(quiet=True)


def attached(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model that are attached already, by this or a wrapper that shares them."""
    return (module for module in model.modules() if isinstance(vars(module).get(STATE), State))
