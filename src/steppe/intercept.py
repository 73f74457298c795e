"""Intercept: the places in a model and an optimizer where steppe sits, and how it leaves no trace.

A copy, a pickle or TorchScript must find nothing of it; so nothing here is a part of the module's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch._compile import _disable_dynamo

from steppe.frozen import Forward

if TYPE_CHECKING:
    from steppe.hooks import Hooks

CALLS, STATE = ("_compiled_call_impl", "_call_impl"), "__getstate__"
ASKS = "_step_supports_amp_scaling"
HOOKS = (
    *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    *("_forward_pre_hooks", "_forward_hooks"),
)


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
        for name in HOOKS:
            if name in state:
                kept = ((k, h) for k, h in state[name].items() if not isinstance(_bare(h), Hook))
                state[name] = type(state[name])(kept)
        return state


class Hook:
    """A hook of ours in a module's own tables, to be known by."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        getattr(self._owner, self._name)(*args, **kwargs)


def _bare(hook: Any) -> Any:
    return getattr(hook, "hook", hook)  # torch wraps those of load_state_dict


class ScalerAsks:
    """Stands in for what a GradScaler asks of an optimizer right before it steps: whether it can
    unscale gradients by itself. torch says in no other place that a scaler is there."""

    def __init__(self, answer: bool) -> None:
        self._answer, self.asked = answer, False

    def __bool__(self) -> bool:
        self.asked = True
        return self._answer
