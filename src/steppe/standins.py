"""Stand-ins: what of ours lies in the attributes of models and optimizers, and stays out of every copy.

A forward hook would stand in every pickle of the model, TorchScript would try to compile it, and Ctrl-C would
pass it by.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from steppe.frozen import Forward

if TYPE_CHECKING:
    from steppe.hooks import Hooks
    from steppe.training import Training

CALLS, STATE = ("_compiled_call_impl", "_call_impl"), "__getstate__"
COPIES = ("__deepcopy__", "__reduce__", "__reduce_ex__")
MODE, ASKS = "train", "_step_supports_amp_scaling"


def attached(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model that are attached already, by this or a wrapper that shares them."""
    return (module for module in model.modules() if isinstance(vars(module).get(STATE), State))


class StandIn:
    """What stands in an attribute of a module or optimizer until `remove()`."""

    def __init__(self, hooks: Any, module: Any, name: str) -> None:
        self._hooks, self._module, self._name = hooks, module, name
        self._kind: Any = type(module)
        vars(module)[name] = self

    def remove(self) -> None:
        if vars(self._module).get(self._name) is self:
            del vars(self._module)[self._name]


class Call(StandIn):
    """What runs when the attached model is called, in the place of torch's own way to call it."""

    def __init__(self, hooks: Hooks, module: nn.Module) -> None:
        compiled = getattr(module, CALLS[0], None)
        name = CALLS[1] if compiled is None else CALLS[0]  # module.compile() came before
        self._call, self._removed = getattr(module, name), False
        super().__init__(hooks, module, name)

    def remove(self) -> None:
        self._removed = True  # module.compile() may have come since and keep this object
        super().remove()
        if self._name == CALLS[0]:
            vars(self._module).setdefault(self._name, self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:
            return self._call(*args, **kwargs)
        self._hooks.before_forward(self._module, (args, kwargs))
        try:
            output = self._call(*args, **kwargs)
        except BaseException:
            self._hooks.forward_failed()
            raise
        self._hooks.after_forward(self._module, (args, kwargs), output)
        return output


class State(StandIn):
    """What a copy or a pickle of a module or optimizer is made from: true weights, nothing of ours."""

    def __call__(self) -> Any:
        self._hooks.before_look()
        kind: Any = type(self._module)  # now: parametrizations come and go
        state = kind.__getstate__(self._module)
        return without_ours(state) if isinstance(state, dict) else state


def without_ours(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module without stand-ins, and its tables without our hooks."""
    ours = (StandIn, Forward)
    state = {k: v for k, v in state.items() if k not in CALLS and not isinstance(v, ours)}
    for name, table in state.items():
        if name.endswith("_hooks") and isinstance(table, dict):
            state[name] = type(table)((k, h) for k, h in table.items() if not _is_ours(h))
    return state


class Copy(StandIn):
    """A class's own way to copy or pickle its modules (torch.fx and parametrizations have one), which knows
    nothing of `State`: for its time the module has nothing of ours."""

    def __call__(self, *args: Any) -> Any:
        self._hooks.before_look()
        own = vars(self._module)
        clean = without_ours(own)
        ours = {name: value for name, value in own.items() if clean.get(name) is not value}
        try:
            for name in ours:
                del own[name]
            own.update({name: clean[name] for name in ours if name in clean})
            return getattr(self._kind, self._name)(self._module, *args)
        finally:
            own.update(ours)


class Mode(StandIn):
    """A module's `train()` and `eval()`: a part may be evaluated without a call of the attached model."""

    def __call__(self, mode: bool = True) -> Any:
        if not mode:
            self._hooks.before_evaluation()
        kind: Any = type(self._module)
        return kind.train(self._module, mode)


def stand_ins(hooks: Hooks, module: nn.Module) -> Iterator[StandIn]:
    """All of a part of the model."""
    yield State(hooks, module, STATE)
    for name in COPIES:
        if getattr(type(module), name, None) is not getattr(object, name, None):
            yield Copy(hooks, module, name)
    if MODE not in vars(module):
        yield Mode(hooks, module, MODE)


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

    def __init__(self, optimizer: Optimizer, several: bool) -> None:
        self._own, self.several = vars(optimizer), several
        self._answer = getattr(optimizer, ASKS, False)
        self.users: list[Hooks] = []
        self._own[ASKS] = self
        State(self, optimizer, STATE)

    @staticmethod
    def join(hooks: Hooks, optimizer: Optimizer, several: bool) -> Callable[[], None]:
        """What takes these hooks away again."""
        asks = vars(optimizer).get(ASKS)
        asks = asks if isinstance(asks, ScalerAsks) else ScalerAsks(optimizer, several)
        asks.users.append(hooks)
        return partial(asks._leave, hooks)

    def _leave(self, hooks: Hooks) -> None:
        self.users.remove(hooks)
        if not self.users:
            del self._own[ASKS], self._own[STATE]
            if self._answer:
                self._own[ASKS] = True

    def before_look(self) -> None:
        for hooks in self.users:
            hooks.before_look()

    def __bool__(self) -> bool:
        for hooks in self.users:
            hooks.scaled = True
        return self._answer


def check_scaler(training: Training) -> None:
    """A scaler steps the optimizer: refuse what it would make wrong if nobody announced it."""
    noted = training.several and any(n.learns_from == "pass" for n in training.states)
    if training.scaler is not None or not (
        (unscaled := training.step.loss_unscaled) or noted or training.steered
    ):
        return
    problem = (
        "perturber.backward() did not multiply the loss by its scale"
        if unscaled
        else f"{training.method.name}() reads gradients inside backward, where they are "
        "multiplied by its scale"
    )
    raise RuntimeError(
        f"A GradScaler steps the optimizer, but {problem}. Tell steppe of it: attach(..., scaler=scaler)."
        f"{' Let loss_of return the loss without scaler.scale(): that is done for you.' * unscaled}"
    )


def check_unscaled(training: Training, loss: Any) -> None:
    """`perturber.backward` scales the loss by itself: refuse one that is scaled already."""
    scale, node = getattr(training.scaler, "_scale", None), getattr(loss, "grad_fn", None)
    while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
        if scale is not None and node._saved_other is scale:
            raise RuntimeError(
                "loss_of returned the loss multiplied by the scaler's scale, which perturber.backward() multiplies "
                "it by as well. Return it without scaler.scale()."
            )
        node = node.next_functions[0][0]


def calls_under_way(optimizer: Optimizer) -> int:
    """How many calls of its step() are under way: a subclass may call `super().step()`. The stack knows;
    of calls that are merely counted, one that raised would stay for ever."""
    frames = [frame for frame, _ in walk_stack(sys._getframe(2))]
    torchs = [f for f in frames if f.f_code is frames[0].f_code]  # its wrapper around each of them
    return sum(any(value is optimizer for value in f.f_locals.values()) for f in torchs)
