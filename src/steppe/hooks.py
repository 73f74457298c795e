"""Hooks: how an unchanged training loop runs passes.

A call of the attached model, in training mode and with gradients, begins a pass; the end of the
backward over its output ends it; everything else that looks at the weights finds the true ones.

Nothing of it is part of the model: copies, pickles and TorchScript of an attached model are made from its
state without any of this, at the true weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from steppe.distributed import is_sharded
from steppe.frozen import Forward
from steppe.passes import EARLY, Run, put_back
from steppe.schedules import watch_pull
from steppe.step import loop_closure, loss_closure
from steppe.training import Training

CALLS, STATE = ("_compiled_call_impl", "_call_impl"), "__getstate__"
ASKS = "_step_supports_amp_scaling"


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
        numbers = training.leaves.numbers
        self._owners = [
            (module, name, param, numbers[param])
            for module in self._modules
            for name, param in module._parameters.items()
            if param is not None and param in numbers
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

    def before_look(self, *_: Any, **__: Any) -> None:
        self._training.restore()

    def before_load(self, *_: Any, **__: Any) -> None:
        self._training.restore()
        self._training.marks = None

    def gathered(self, module: nn.Module, _: Any) -> None:
        """Weigh the gradients of the gathered parameters: sharded ones see none of autograd."""
        inside = set(module.modules())
        for owner, name, _param, number in self._owners:
            if owner in inside:
                param = owner._parameters[name]
                if param is not None and not is_sharded(param):
                    self._training.leaves.watch(param, number)

    @_disable_dynamo
    def before_forward(self, module: nn.Module) -> None:
        training, running = self._training, self._training.step.running
        if training.probing:
            return
        grad = torch.is_grad_enabled()
        if (held := training.holding) is not None:
            if not (module.training or grad):
                training.restore()
            elif running is not held:
                raise RuntimeError(put_back(held))
            return
        if running is not None and running.in_backward:
            return  # activation checkpointing runs forwards inside backward
        if not (module.training and grad) or not any(p.noisy for p in training.weights.params):
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
        training.begin(Run(training, *training.next_pass(), held=False))

    def forward_failed(self) -> None:
        running = self._training.step.running
        if running is not None and not running.held and not running.in_backward:
            self._training.restore()

    @_disable_dynamo
    def after_forward(self, module: nn.Module, output: Any) -> None:
        training, running = self._training, self._training.step.running
        if running is None or (running.in_backward and not running.held):
            return
        if training.step.metered:
            seen = output if training.loop.outputs is None else training.loop.outputs(output)
            training.step.pull_is_loss = watch_pull(running, seen)
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

    def _on_output_gradient(self, run: Run, gradient: Tensor) -> None:
        """Backward has reached an output. Its end is queued from here, not from a parameter's
        hook, which also fires inside the nested backward of reentrant checkpointing."""
        training = self._training
        if torch.is_grad_enabled():
            training.restore()
            raise RuntimeError(
                "create_graph=True differentiates through weights that are put back after backward. "
                f"Hold the pass open over both backwards: {training.loop.hold}"
            )
        if training.step.running is not run:
            raise RuntimeError(
                "This graph was built at perturbed weights that have been put back since: by another "
                "backward over it, an evaluation, state_dict() or optimizer.step() in between. Run "
                "one backward right after its forward, or hold the pass open over all of it: "
                f"{training.loop.hold}"
            )
        if not run.in_backward:
            training.step.backward_begins(run)
        if not run.end_is_queued:
            run.end_is_queued = True
            if training.several and training.ranks.index is None and training.number < EARLY:
                training.compare_losses(run, gradient)
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(EndOfBackward(training, run))

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
        run = loss_closure if training.loop.closure == "loss" else loop_closure
        ours = partial(run, training, closure)
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

    def __init__(self, training: Training, run: Run) -> None:
        self._training, self._run = training, run

    def __call__(self) -> None:
        self._training.finish(self._run)

    def __del__(self) -> None:
        if self._training.step.running is self._run:
            self._training.restore(quiet=True)


def attached(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model that are attached already, by this or a wrapper that shares them."""
    return (module for module in model.modules() if isinstance(vars(module).get(STATE), State))


class Call:
    """What runs when the attached model is called, in the place of torch's own way to call it.

    A forward hook would stand in every pickle of the model, TorchScript would try to compile it, and
    Ctrl-C would pass it by.
    """

    def __init__(self, hooks: Hooks, module: nn.Module) -> None:
        self._hooks, self._module = hooks, module
        compiled = getattr(module, CALLS[0], None)
        self._name = CALLS[1] if compiled is None else CALLS[0]  # module.compile() came before
        self._call = getattr(module, self._name)
        vars(module)[self._name] = self

    def remove(self) -> None:
        if vars(self._module).get(self._name) is self:
            del vars(self._module)[self._name]
            if self._name == CALLS[0]:
                vars(self._module)[self._name] = self._call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._hooks.before_forward(self._module)
        try:
            output = self._call(*args, **kwargs)
        except BaseException:
            self._hooks.forward_failed()
            raise
        self._hooks.after_forward(self._module, output)
        return output


class State:
    """What a copy or a pickle of a module is made from: true weights, and nothing of ours."""

    def __init__(self, hooks: Hooks, module: nn.Module) -> None:
        self._hooks, self._module = hooks, module

    def __call__(self) -> Any:
        self._hooks.before_look()
        state = type(self._module).__getstate__(self._module)
        if not isinstance(state, dict):
            return state
        ours = (STATE, *CALLS)
        state = {k: v for k, v in state.items() if k not in ours and not isinstance(v, Forward)}
        for name, table in state.items():
            if name.endswith("_hooks") and isinstance(table, dict):
                state[name] = type(table)((k, h) for k, h in table.items() if not _is_ours(h))
        return state


class Hook:
    """A hook of ours in a module's own tables, to be known by."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        getattr(self._owner, self._name)(*args, **kwargs)


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "hook", hook), Hook)  # torch wraps those of load_state_dict


class ScalerAsks:
    """Stands in for what a GradScaler asks of an optimizer right before it steps: whether it can
    unscale gradients by itself. torch says in no other place that a scaler is there."""

    def __init__(self, answer: bool) -> None:
        self._answer, self.asked = answer, False

    def __bool__(self) -> bool:
        self.asked = True
        return self._answer
