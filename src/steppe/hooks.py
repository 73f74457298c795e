"""Hooks: how an unchanged training loop runs passes.

A call of the attached model, in training mode and with gradients, begins a pass; the end of the
backward over its output ends it; everything else that looks at the weights finds the true ones.

Nothing of it is part of the model: copies, pickles and TorchScript of an attached model are made from its
state without any of this, at the true weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from steppe.distributed import is_sharded
from steppe.leaves import leaves_of
from steppe.passes import EARLY, Run, differentiable, put_back
from steppe.standins import Call, Hook, ScalerAsks, calls_under_way, check_scaler, stand_ins
from steppe.training import Training


class Hooks:
    """All hooks of one training, installed and removed together."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.scaled = False
        """Whether a GradScaler is about to step the optimizer."""
        model, optimizer, numbers = training.model, training.optimizer, training.leaves.numbers
        # a module without weights may be a part of several models
        modules = [m for m in model.modules() if next(m.parameters(), None) is not None]
        self._owners = [
            (module, name, param, numbers[param])
            for module in modules
            for name, param in module._parameters.items()
            if param is not None and param in numbers
        ]
        gather = training.several and training.weights.shards.several
        with ExitStack() as undo:
            undo.callback(training.let_go)

            def add(handle: Any) -> None:
                undo.callback(handle.remove)

            add(optimizer.register_step_pre_hook(self.before_step))
            add(optimizer.register_step_post_hook(self.after_step))
            undo.callback(ScalerAsks.join(self, optimizer, training.several))
            for module in modules:
                for stand_in in stand_ins(self, module):
                    add(stand_in)
                add(module.register_state_dict_pre_hook(Hook(self, "before_look")))
                add(module.register_load_state_dict_pre_hook(Hook(self, "before_load")))
                if gather and hasattr(module, "reshard"):
                    # after FSDP's own, when the module's parameters are the gathered ones
                    add(module.register_forward_pre_hook(Hook(self, "gathered")))
            undo.callback(training.weights.frozen.remove)
            training.weights.frozen.install()
            add(Call(self, model))
            self._undo = undo.pop_all()

    def remove(self) -> None:
        """Leave model and optimizer as they were, and no reference to either."""
        self._undo.close()
        self._owners = []

    def before_look(self, *_: Any, **__: Any) -> None:
        self._training.restore()

    def before_evaluation(self) -> None:
        """A part of the model goes into evaluation mode, maybe after a discarded loss."""
        running = self._training.step.running
        if running is not None and running.forwarded and not (running.held or _under_way(running)):
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
        for param in (p for owner in inside for p in owner._parameters.values()):
            if param is not None and not is_sharded(param):  # those without noise are weighed, too
                self._training.leaves.watch(param)

    @_disable_dynamo
    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        training, running = self._training, self._training.step.running
        if training.probing:
            return
        grad = torch.is_grad_enabled() and not torch._C._get_tracing_state()
        if (held := training.holding) is not None:
            if not (module.training or grad):
                training.restore()
            elif running is not held:
                raise RuntimeError(put_back(held))
            return
        if running is not None and _under_way(running):
            return  # activation checkpointing runs forwards inside backward
        noisy = any(p.noisy for p in training.weights.params)  # or a part without noise is trained
        trains = noisy or any(p.requires_grad for p in module.parameters())
        if not (module.training and grad and trains):
            training.restore()
        elif running is not None:
            if training.weights.written():
                training.restore()  # which raises
            running.forwarded = running.in_backward = False
        elif training.method.perturbs:
            self._check_own_weights()
            self._check_inputs(inputs)
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

    def _check_inputs(self, inputs: Any) -> None:
        """Notice, in the first steps, inputs that depend on weights which are about to move."""
        training = self._training
        if training.number >= EARLY:
            return
        for leaf in leaves_of([t.grad_fn for t in differentiable(inputs)]):
            if (number := training.leaves.numbers.get(leaf)) is not None:  # type: ignore[call-overload]
                raise RuntimeError(
                    f"An input of the attached model was computed with its {training.weights.params[number].name}, "
                    "which was not perturbed there. Hold the pass open over all of it: "
                    f"{training.loop.hold}."
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
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "The attached model is called inside a transform of torch.func (vmap, jacrev, …), where "
                f"no noise can be drawn. Hold the pass open over all of it: {training.loop.hold}."
            )
        training.new_step_if_abandoned()
        training.begin(Run(training, *training.next_pass(), held=False))

    def forward_failed(self) -> None:
        running = self._training.step.running
        if running is not None and not running.held and not _under_way(running):
            self._training.restore()

    @_disable_dynamo
    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        training, running = self._training, self._training.step.running
        if running is None or (_under_way(running) and not running.held):
            return
        if training.step.metered:
            seen = output if training.loop.outputs is None else training.loop.outputs(output)
            running.watch_pull(seen, training.sees_outputs)
        if running.held:
            return
        running.forwarded = True
        tensors = [t for t in differentiable(output) if t.grad_fn]
        given = {id(t) for i in differentiable(inputs) for t in (i, i._base)}
        # an operation in place on a view takes the view's hooks away, but not those of what it views
        bases = [t._base for t in tensors if t._base is not None and t._base.grad_fn]
        own = [t for t in (*tensors, *bases) if id(t) not in given]
        if not tensors:
            self._training.restore()
            raise RuntimeError(
                f"{type(module).__name__} returned no differentiable tensor that steppe can see "
                f"(got {type(output).__name__}), so the end of its backward cannot be found. Return "
                f"tensors, or tuples, lists or dictionaries of them, or use {self._training.loop.hold}."
            )
        for tensor in own or tensors:
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
        scaled, self.scaled = self.scaled, False
        if training.stepping and (depth := calls_under_way(training.optimizer)) > 1:
            training.stepping = depth
            return None
        training.restore()
        training.leaves.notice_added()
        if scaled:
            check_scaler(training)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        step, training.stepping = training.step, 0
        if closure is None:
            step.idle = not step.done and _stands_still(training.optimizer)
            if not (step.idle or step.settled):  # by a try before that raised
                step.settle()
            training.stepping = 1
            return None
        if step.settled:
            training.new_step()
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


def _under_way(run: Run) -> bool:
    """Whether a backward of this pass is: one over weights alone may have come before and be over."""
    return run.in_backward and torch._C._current_graph_task_id() != -1


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


def loss_closure(training: Training, closure: Callable[[], Any]) -> Any:
    """Run all passes over a closure that zeroes gradients and differentiates by itself, once."""
    method, leaves = training.method, training.leaves
    if training.step.settled:
        raise RuntimeError(
            f"{type(training.optimizer).__name__} calls its closure more than once a step, which "
            "weight perturbation cannot serve."
        )
    if method.feed != "one" or method.m:
        batches = "batch1, batch2" if method.feed == "each" else "batch"
        raise RuntimeError(
            f"{method.name}() cannot take its batches from a closure. Call "
            f"perturber.backward(loss_of, {batches}), then optimizer.step() without one."
        )
    training.new_step()  # passes from before the closure do not count, nor do their gradients
    theirs = {leaf: g for leaf, g in leaves.set_aside().items() if leaf not in leaves.ours}
    total: Any = None
    with training.running_closure(), ExitStack() as exits:
        exits.callback(leaves.give_back, theirs)
        for index, planned in enumerate(method.passes):
            before = leaves.set_aside()  # the closure zeroes them
            with Run(training, index, planned.weight), torch.enable_grad():
                loss = closure()
            leaves.give_back(before)
            if planned.weight and not leaves.have_gradients:
                raise RuntimeError(
                    "The closure given to optimizer.step() ran no backward, and gradients from "
                    "before it do not count. Let it call loss.backward(), or step without one."
                )
            if planned.weight and loss is not None:
                part = planned.weight * loss
                total = part if total is None else total + part
        training.step.settle()
    return total


def loop_closure(training: Training, closure: Callable[[], Any]) -> Any:
    """Run a closure whose passes the hooks run, and settle the step."""
    with training.running_closure():
        loss, step = closure(), training.step
        step.idle = loss is None and not step.done
        if not step.idle:  # a closure that ran no pass and gives no loss skips its step
            step.settle()
    return loss


class EndOfBackward:
    """Called by autograd when a backward is over. If the backward raised, autograd lets go of it
    instead, and that puts the weights back too."""

    _training: Training | None = None  # where a compiler made it without __init__

    def __init__(self, training: Training, run: Run) -> None:
        self._training, self._run = training, run

    def __call__(self) -> None:
        if self._training is not None:
            self._training.finish(self._run)

    def __del__(self) -> None:
        if self._training is not None and self._training.step.running is self._run:
            self._training.restore(quiet=True)
