"""Stand-ins: what of ours lies in the attributes of models and optimizers, and stays out of every copy.

A forward hook would stand in every pickle of the model, TorchScript would try to compile it, and Ctrl-C would
pass it by.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from steppe.frozen import Forward

if TYPE_CHECKING:
    from steppe.hooks import Hooks
    from steppe.training import Training

CALLS, STATE = ("_compiled_call_impl", "_call_impl"), "__getstate__"
MODE, ASKS = "train", "_step_supports_amp_scaling"


def attached(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model that are attached already, by this or a wrapper that shares them."""
    return (module for module in model.modules() if isinstance(vars(module).get(STATE), State))


class Call:
    """What runs when the attached model is called, in the place of torch's own way to call it."""

    def __init__(self, hooks: Hooks, module: nn.Module) -> None:
        self._hooks: Hooks | None = hooks
        self._module = module
        compiled = getattr(module, CALLS[0], None)
        self._name = CALLS[1] if compiled is None else CALLS[0]  # module.compile() came before
        self._call = getattr(module, self._name)
        vars(module)[self._name] = self

    def remove(self) -> None:
        self._hooks = None  # module.compile() may have come since and keep this object
        if vars(self._module).get(self._name) is self:
            del vars(self._module)[self._name]
            if self._name == CALLS[0]:
                vars(self._module)[self._name] = self._call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (hooks := self._hooks) is None:
            return self._call(*args, **kwargs)
        hooks.before_forward(self._module, (args, kwargs))
        try:
            output = self._call(*args, **kwargs)
        except BaseException:
            hooks.forward_failed()
            raise
        hooks.after_forward(self._module, (args, kwargs), output)
        return output


class State:
    """What a copy or a pickle of a module or optimizer is made from: true weights, nothing of ours."""

    def __init__(self, users: list[Hooks], module: nn.Module | Optimizer) -> None:
        self._users, self._module = users, module

    def __call__(self) -> Any:
        for hooks in self._users:
            hooks.before_look()
        state = type(self._module).__getstate__(self._module)  # type: ignore[arg-type]
        if not isinstance(state, dict):
            return state
        ours, kinds = (STATE, *CALLS), (Forward, Mode)
        state = {k: v for k, v in state.items() if k not in ours and not isinstance(v, kinds)}
        for name, table in state.items():
            if name.endswith("_hooks") and isinstance(table, dict):
                state[name] = type(table)((k, h) for k, h in table.items() if not _is_ours(h))
        return state


class Mode:
    """A module's `train()` and `eval()`: a part may be evaluated without a call of the attached model."""

    def __init__(self, hooks: Hooks, module: nn.Module) -> None:
        self._hooks, self._module = hooks, module

    def __call__(self, mode: bool = True) -> nn.Module:
        if not mode:
            self._hooks.before_evaluation()
        return type(self._module).train(self._module, mode)


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
    unscale gradients by itself. torch says in no other place that a scaler is there.

    An optimizer has one of it, and one `State`, for all models that are attached with it."""

    def __init__(self, answer: bool, several: bool) -> None:
        self._answer, self.several = answer, several
        self._users: list[Hooks] = []

    @staticmethod
    def join(hooks: Hooks, optimizer: Optimizer, several: bool) -> None:
        asks = getattr(optimizer, ASKS, False)
        if not isinstance(asks, ScalerAsks):
            asks = vars(optimizer)[ASKS] = ScalerAsks(asks, several)
            vars(optimizer)[STATE] = State(asks._users, optimizer)
        asks._users.append(hooks)

    @staticmethod
    def leave(hooks: Hooks, optimizer: Optimizer) -> None:
        asks = vars(optimizer)[ASKS]
        asks._users.remove(hooks)
        if not asks._users:
            del vars(optimizer)[ASKS], vars(optimizer)[STATE]
            if asks._answer:
                setattr(optimizer, ASKS, True)

    def __bool__(self) -> bool:
        for hooks in self._users:
            hooks.scaled = True
        return self._answer


def check_scaler(training: Training) -> None:
    """A scaler steps the optimizer: refuse what it would make wrong if nobody announced it."""
    if training.scaler is not None:
        return
    unscaled = training.step.loss_unscaled
    noted = training.several and any(n.learns_from == "pass" for n in training.states)
    if unscaled or noted or training.steered:
        problem = (
            "perturber.backward() did not multiply the loss by its scale"
            if unscaled
            else f"{training.method.name}() reads gradients inside backward, where they are "
            "multiplied by its scale"
        )
        raise RuntimeError(
            f"A GradScaler steps the optimizer, but {problem}. Tell steppe of it: "
            "attach(..., scaler=scaler)."
        )
