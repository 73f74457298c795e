"""What is left behind: after `detach()`, after something failed half-way, and after Ctrl-C."""

import linecache
import sys
import warnings
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of
from tests.review.loops import attached, data, sgd, step_with, train

RWP = steppe.rwp(0.5)
RISE = steppe.rwp(rise=steppe.constant(0.1))


# ---------------------------------------------------------------------- detach()


@pytest.mark.parametrize("compiled", ["in place", "around"])
def test_a_model_that_was_compiled_since_is_free_after_detach(compiled):
    torch._dynamo.reset()
    model, optimizer, perturber = attached(RWP)
    call = model
    if compiled == "in place":
        model.compile(backend="eager")
    else:
        call = torch.compile(model, backend="eager")
    x, y = data()
    for _ in range(2):
        loss_fn(call(x), y).backward()
        optimizer.step()
    assert perturber.step == 2
    perturber.detach()
    true = weights_of(model)
    loss = loss_fn(call(x), y)
    assert equal(weights_of(model), true)
    loss.backward()

    again = steppe.attach(model, optimizer, RWP)
    loss = loss_fn(call(x), y)
    assert not equal(weights_of(model), true)
    loss.backward()
    assert equal(weights_of(model), true)
    again.detach()


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("ran", [1, 2])
def test_detach_in_the_middle_of_a_step_warns_of_its_gradients(ran, explicit):
    model, optimizer, perturber = attached(steppe.m_rwp(0.5, lam=0.3))
    train(model, optimizer, steps=1, accumulate=2)
    x, y = data()
    runs = perturber.passes() if explicit else [nullcontext()] * 2
    for run in islice(runs, ran):
        with run:
            loss_fn(model(x), y).backward()
    with pytest.warns(UserWarning, match="in the middle of a step") if ran == 1 else nullcontext():
        perturber.detach()


@pytest.mark.parametrize("cleared", ["zero_grad", "step"])
def test_detach_between_steps_does_not_warn(cleared):
    for method in (steppe.m_rwp(0.5, lam=0.3), steppe.sam(0.1), RWP):
        model, optimizer, perturber = attached(method)
        step_with(perturber, model, optimizer, 0)
        if cleared == "zero_grad" and not method.repeats_batch:
            loss_fn(model(data()[0]), data()[1]).backward()
            optimizer.zero_grad()
        perturber.detach()  # a warning of steppe's is an error here


# ---------------------------------------------------------------------- Ctrl-C, wherever it comes


class CtrlC:
    """Raises KeyboardInterrupt before the `at`th line that runs inside, of the modules that hold states.

    Not where a block ends that turns gradients off: there Python itself lets none come.
    """

    MODULES = ("passes.py", "training.py", "batchnorm.py")

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        sys.settrace(self.call)

    def __exit__(self, *_):
        sys.settrace(None)

    def call(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        ours = path.parent.name == "steppe" and path.name in self.MODULES
        return self.line if ours else None

    def line(self, frame, event, argument):
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "torch.no_grad()" not in code:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def normed():
    torch.manual_seed(0)
    parts = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    return nn.Sequential(*parts).double()


def interrupted(method, at, explicit):
    """Whether Ctrl-C came before the end of the step; the next steps must be as if it had not."""
    model, optimizer, perturber = attached(method, model=normed())

    def step(number):
        if explicit:
            step_with(perturber, model, optimizer, number)
        else:
            train(model, optimizer, steps=1)

    step(0)
    true = weights_of(model)
    ctrl_c = CtrlC(at)
    try:
        with ctrl_c:
            x, y = data(1)
            if explicit:
                perturber.backward(lambda: loss_fn(model(x), y))
            else:
                loss_fn(model(x), y).backward()
    except KeyboardInterrupt:
        pass
    perturber.restore()
    assert equal(weights_of(model), true)
    assert [(m.track_running_stats, m.momentum) for m in model[1:3]] == [(True, 0.1)] * 2
    optimizer.zero_grad()
    perturber.new_step()
    step(2)
    assert perturber.step == 2
    return ctrl_c.left <= 0


@pytest.mark.parametrize(
    ("method", "explicit"), [(RISE, True), (RISE, False), (steppe.sam(0.1), True)]
)
def test_nothing_stays_behind_after_ctrl_c_anywhere(method, explicit):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)
        at = 1
        while interrupted(method, at, explicit):
            at += 2
    assert at > 50


# ---------------------------------------------------------------------- an attach() that fails


def state_of(*things):
    """What lies in the attributes of modules and optimizers."""
    return [
        {k: dict(v) if isinstance(v, dict) else v for k, v in vars(thing).items()}
        for thing in things
    ]


def test_a_scripted_part_is_refused_before_anything_is_touched():
    scripted = torch.jit.script(mlp())
    for model in (scripted, nn.Sequential(scripted, nn.Linear(3, 3))):
        optimizer = sgd(model)
        before = state_of(optimizer)
        with pytest.raises(TypeError, match=r"is a ScriptModule.*Attach the model"):
            steppe.attach(model, optimizer, RWP)
        assert state_of(optimizer) == before
    part = torch.jit.script(nn.Tanh())  # it has no weights, and needs no hooks
    model = nn.Sequential(nn.Linear(6, 8), part, nn.Linear(8, 3))
    perturber = steppe.attach(model, sgd(model), RWP)
    perturber.backward(lambda: loss_fn(model(batch()[0]), batch()[1]))


class NoHooks(nn.Linear):
    def register_load_state_dict_pre_hook(self, hook):
        raise RuntimeError("no hooks here")


@pytest.mark.parametrize("fused", [False, True])
def test_an_attach_that_fails_half_way_leaves_nothing(fused):
    model = nn.Sequential(nn.Linear(6, 8), NoHooks(8, 3))
    optimizer = sgd(model, fused=fused)
    before = state_of(model, *model, optimizer)
    with pytest.raises(RuntimeError, match="no hooks here"):
        steppe.attach(model, optimizer, RWP)
    assert state_of(model, *model, optimizer) == before
    model[1] = nn.Linear(8, 3)
    optimizer.param_groups[0]["params"][2:] = model[1].parameters()
    perturber = steppe.attach(model, optimizer, RWP)
    perturber.backward(lambda: loss_fn(model(batch()[0]), batch()[1]))
    perturber.detach()
