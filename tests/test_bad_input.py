"""Bad input gets a clear error before anything is touched."""

import re

import pytest
import torch
from torch import nn

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: steppe.rwp(-1), "sigma must be finite and at least 0, got -1."),
        (lambda: steppe.rwp(NAN), "sigma must be finite and at least 0, got nan."),
        (lambda: steppe.rwp(ratio=INF), "ratio must be finite and at least 0, got inf."),
        (lambda: steppe.rwp(0.1, ratio=0.1), "Give one strength, sigma or ratio or rise; got sigma=0.1, ratio=0.1."),
        (lambda: steppe.rwp(ratio=0.1, isotropic=True), "isotropic noise has no filters to be in ratio to: give sigma."),
        (lambda: steppe.arwp(0.1, eta=-1), "eta must be finite and at least 0, got -1."),
        (lambda: steppe.arwp(0.1, eta=NAN), "eta must be finite and at least 0, got nan."),
        (lambda: steppe.arwp(0.1, beta=1.0), "beta must be in [0, 1), got 1.0."),
        (lambda: steppe.arwp(0.1, beta=-0.1), "beta must be in [0, 1), got -0.1."),
        (lambda: steppe.arwp(0.1, exponent=-1), "exponent must be finite and at least 0, got -1."),
        (lambda: steppe.arwp(ratio=0.1, elementwise=True), "elementwise noise has no filters"),
        (lambda: steppe.m_arwp(ratio=0.1, elementwise=True), "elementwise noise has no filters"),
        (lambda: steppe.m_rwp(0.1, lam=1.5), "lam must be in [0, 1], got 1.5."),
        (lambda: steppe.m_arwp(0.1, lam=-0.1), "lam must be in [0, 1], got -0.1."),
        (lambda: steppe.mixed(steppe.sam()), "mixed() takes a method of one pass, but sam has 2."),
        (lambda: steppe.sam(-0.1), "rho must be finite and at least 0, got -0.1."),
        (lambda: steppe.sam(m=0), "m is the number of samples in a part, at least 1, got m=0."),
        (lambda: steppe.sam(m=4, same_batch=False), "m-sharpness needs same_batch=True"),
        (lambda: steppe.asam(eta=-1), "eta must be finite and at least 0, got -1."),
        (lambda: steppe.lpf_sgd(0.1, samples=0), "samples must be at least 1, got 0."),
        (lambda: steppe.msam(momentum=1.0), "momentum must be in [0, 1), got 1.0."),
        (lambda: steppe.Method("none", ()), "A method needs at least one pass."),
        (lambda: steppe.Method("half", (steppe.Pass(weight=0.5),)), "must add up to 1, got [0.5]"),
        (lambda: steppe.Method("up", (steppe.Pass(steppe.Ascent(0.1)),)), "needs the gradient of a pass before it, but comes first"),
        (lambda: steppe.Gaussian(), "Give one strength, sigma or ratio or rise; got none."),
    ],
)  # fmt: skip
def test_methods_refuse_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_strengths_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"sigma must be a number or a schedule, got '0\.1'"):
        steppe.rwp("0.1")
    with pytest.raises(TypeError, match=r"rho must be a number or a schedule, got \[1\]"):
        steppe.sam([1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: steppe.arwp(0.1, eta="1"), "eta must be a number, got '1'."),
        (lambda: steppe.arwp(0.1, beta="1"), "beta must be a number, got '1'."),
        (lambda: steppe.arwp(0.1, exponent=None), "exponent must be a number, got None."),
        (lambda: steppe.m_rwp(0.1, lam="1"), "lam must be a number, got '1'."),
        (lambda: steppe.msam(momentum="1"), "momentum must be a number, got '1'."),
        (lambda: steppe.lpf_sgd(0.1, samples=2.5), "samples must be a whole number, got 2.5."),
        (lambda: steppe.cosine_increase(0, 1, "9"), "steps must be a number, got '9'."),
        (lambda: steppe.mixed("rwp"), "mixed() takes a method such as steppe.rwp(), got 'rwp'."),
        (lambda: steppe.Method("m", (steppe.rwp(0.1),)), "A pass is such as steppe.Pass("),
        (lambda: steppe.Method("m", (steppe.Pass(steppe.rwp(0.1)),)), "A pass is such as steppe.Pass("),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_type(make, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


def test_parts_of_a_batch_are_counted_in_whole_samples():
    for m in (2.5, "4"):
        with pytest.raises(ValueError, match=f"at least 1, got m={m!r}"):
            steppe.sam(m=m)


def test_a_schedule_that_gives_no_number():
    model = mlp()
    steppe.attach(model, sgd(model), steppe.rwp(lambda step: "strong"))
    with pytest.raises(TypeError, match="sigma: the schedule gave 'strong' at step 0, no number"):
        model(batch()[0])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_attach_refuses_things_of_the_wrong_kind():
    model = mlp()
    cases = [
        (("model", sgd(model), steppe.rwp()), "model must be a torch.nn.Module, got str"),
        ((model, model, steppe.rwp()), "optimizer must be a torch.optim.Optimizer, got Sequential"),
        ((sgd(model), model, steppe.rwp()), "got SGD. The order is attach(model, optimizer, method)."),
        ((model, model.parameters(), steppe.rwp()), "got generator. Make one first: torch.optim.SGD("),
        ((model, torch.optim.SGD, steppe.rwp()), "got the class SGD. Make one first"),
        ((model, torch.optim.lr_scheduler.StepLR(sgd(model), 1), steppe.rwp()), "got StepLR."),
        ((model, sgd(model), "rwp"), "method must be a steppe.Method such as steppe.arwp(), got 'rwp'."),
        ((model, sgd(model), "m-rwp"), "got 'm-rwp'. Did you mean steppe.m_rwp()?"),
        ((model, sgd(model), steppe.rwp), "Did you mean steppe.rwp()?"),
        ((model, torch.optim.LBFGS(model.parameters()), steppe.rwp()), "LBFGS calls its closure many times"),
    ]  # fmt: skip
    for arguments, message in cases:
        with pytest.raises(TypeError, match=re.escape(message)):
            steppe.attach(*arguments)
    for option in ("exclude", "include_frozen"):
        for given, got in ((3, "int"), ([model[0].weight], "Parameter"), (None, "NoneType")):
            with pytest.raises(TypeError, match=f"{option} takes names of parameters.*got {got}"):
                steppe.attach(model, sgd(model), steppe.rwp(), **{option: given})
    with pytest.raises(TypeError, match="seed must be an int, got 'a'"):
        steppe.attach(model, sgd(model), steppe.rwp(), seed="a")
    with pytest.raises(TypeError, match="scaler must be a torch.amp.GradScaler, got int"):
        steppe.attach(model, sgd(model), steppe.rwp(), scaler=3)
    with pytest.raises(ValueError, match="microbatch_loss must be one of 'mean', 'sum', got 'max'"):
        steppe.attach(model, sgd(model), steppe.rwp(), microbatch_loss="max")
    with pytest.raises(ValueError, match="on_incomplete must be one of 'warn', 'raise', got 'no'"):
        steppe.attach(model, sgd(model), steppe.rwp(), on_incomplete="no")
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        steppe.attach(model, sgd(model), steppe.rwp(), sigma=1)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_parameters_that_are_not_the_models():
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"The optimizer's 4 parameters \(shapes \(8, 6\)"):
        steppe.attach(model, optimizer, steppe.rwp())


def test_a_second_attach_to_the_same_model_or_a_part_or_a_wrapper():
    model = mlp()
    perturber = steppe.attach(model, sgd(model), steppe.rwp())
    for target in (model, model[0], nn.Sequential(model)):
        with pytest.raises(RuntimeError, match=r"attached already. Call detach\(\)"):
            steppe.attach(target, sgd(target), steppe.rwp())
    perturber.detach()
    steppe.attach(nn.Sequential(model), sgd(model), steppe.rwp())


def test_several_optimizers_on_one_model():
    model = mlp()
    steppe.attach(model, sgd(model[0]), steppe.rwp())
    with pytest.raises(RuntimeError, match="attached already"):
        steppe.attach(model, sgd(model[2]), steppe.rwp())


def test_non_floating_parameters():
    model = mlp()
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)
    with pytest.raises(TypeError, match=r"table has dtype torch.int64.*exclude=\('table',\)"):
        steppe.attach(model, sgd(model), steppe.rwp())
    steppe.attach(model, sgd(model), steppe.rwp(), exclude=("table",))


def test_bad_options_of_a_group_and_nothing_left():
    model = mlp()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "strength": -1}], lr=0.1)
    with pytest.raises(
        ValueError, match="strength of a parameter group must be finite and at least 0, got -1"
    ):
        steppe.attach(model, optimizer, steppe.rwp())
    several = (
        r"Nothing is left to perturb: 0.weight \(excluded by '\*'\), .* and 1 more\. Freeze or"
    )
    with pytest.raises(ValueError, match=several):
        steppe.attach(model, sgd(model), steppe.rwp(), exclude=("*",))


def test_a_schedule_without_a_length_is_asked_for_it():
    model = mlp()
    method = steppe.arwp(steppe.cosine_increase(0, 0.01))
    assert method.needs_steps
    with pytest.raises(ValueError, match="does not know how long training is"):
        steppe.attach(model, sgd(model), method)
    filled = method.with_steps(10)
    assert not filled.needs_steps
    assert filled.passes[0].perturbation.sigma(10) == pytest.approx(0.01)
    steppe.attach(model, sgd(model), filled)


@pytest.mark.parametrize("bad", [NAN, INF, -1.0])
def test_a_schedule_that_returns_nonsense_stops_the_pass_with_true_weights(bad):
    model = mlp()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp(lambda t: 0.1 if t == 0 else bad))
    x, y = batch()
    loss_fn(model(x), y).backward()
    optimizer.step()
    true = weights_of(model)
    with pytest.raises(ValueError, match="sigma: the schedule's value at step 1 must be finite"):
        model(x)
    assert equal(true, weights_of(model))
    assert perturber.step == 1


class Unfinished(steppe.Perturbation):
    """What training needs, and none of the hooks that only some perturbations need."""

    def strength(self, step):
        return 0.1

    def move(self, weights, state, draw, gradient):
        weights.add_noise(draw, 0.1 * weights.filter_norms())


@pytest.mark.parametrize(
    ("defined", "lacking"),
    [
        ({"learns_from": "step"}, "learn"),
        ({"learns_from": "pass"}, "collect"),
        (
            {"learns_from": "pass", "collect": lambda self, weights, grads, noted: grads},
            "learn_noted",
        ),
    ],
)
def test_a_hook_that_an_own_perturbation_lacks_is_named(defined, lacking):
    own = type("Own", (Unfinished,), defined)()
    method = steppe.mixed(steppe.Method("own", (steppe.Pass(own),)), same_batch=True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, method)
    x, y = batch()

    def use():
        perturber.backward(lambda: loss_fn(model(x), y))
        optimizer.step()

    with pytest.raises(NotImplementedError, match=rf"Own must define {lacking}\(\)"):
        use()


def test_an_own_perturbation_need_not_know_its_radius():
    model = mlp()
    own = steppe.Method("own", (steppe.Pass(Unfinished()),))
    perturber = steppe.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), own)
    assert "expected ‖eps‖/‖w‖ unknown" in repr(perturber)
