"""What counts as a step and as a pass, in loops that make it hard to tell."""

import pytest
import torch

import steppe
from tests.nets import equal, loss_fn, weights_of
from tests.review.loops import assert_close, attached, data, history_of, net, sgd, step_with, train

ARWP = steppe.arwp(0.05, eta=5.0)
M_ARWP = steppe.m_arwp(0.05, eta=5.0)


# ---------------------------------------------------------------------- one step, counted once


def inherited():
    """A fresh pair of classes: torch patches `step` of each class whose instance is made."""

    class Base(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * p.grad)

    class Derived(Base):
        def step(self, closure=None):
            return super().step(closure)

    return Base, Derived


@pytest.mark.parametrize(
    "made_before",
    [False, True],
)
@pytest.mark.parametrize("method", [ARWP, M_ARWP], ids=lambda method: method.name)
def test_an_optimizer_that_calls_its_base_class_takes_one_step(method, made_before):
    base, derived = inherited()
    if made_before:
        base(net().parameters())
    ends = []
    for kind in (derived, lambda params: sgd(params)):
        model = net()
        optimizer = kind(model.parameters())
        perturber = steppe.attach(model, optimizer, method)
        train(model, optimizer, accumulate=method.batches_needed)
        ends.append([*weights_of(model), *history_of(perturber)])
        assert perturber.step == 3
    assert_close(*ends)


def test_a_subclass_of_sgd_takes_one_step_with_a_closure_too():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = net()
    optimizer = Mine(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.sam(0.1))

    def closure():
        optimizer.zero_grad()
        loss = loss_fn(model(data()[0]), data()[1])
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    assert perturber.step == 2


# ---------------------------------------------------------------------- a step that raises


class Failing(torch.optim.SGD):
    """An optimizer whose step raises when asked to, before or after its base class has stepped."""

    fails = None

    def fail(self, when):
        if self.fails == when:
            self.fails = None
            raise MemoryError("planned")

    def step(self, closure=None):
        self.fail("before")
        value = super().step(closure)
        self.fail("after")
        return value


@pytest.mark.parametrize("caught", ["inside", "outside"])
@pytest.mark.parametrize("method", [ARWP, M_ARWP], ids=lambda method: method.name)
def test_a_step_that_raises_and_is_taken_again_counts_once(method, caught):
    ends = []
    for fails in (True, False):
        model = net()
        optimizer = Failing(model.parameters(), lr=0.1)
        perturber = steppe.attach(model, optimizer, method)

        def again(optimizer=optimizer):
            try:
                optimizer.step()
            except MemoryError:
                if caught == "inside":  # the first one's frames are still alive
                    return optimizer.step()
            else:
                return None
            return optimizer.step()

        for step in range(3):
            optimizer.fails = "before" if fails and step == 1 else None
            for part in range(len(method.passes)):
                loss_fn(model(data(2 * step + part)[0]), data(2 * step + part)[1]).backward()
            again()
            optimizer.zero_grad()
        assert perturber.step == 3
        ends.append([*weights_of(model), *history_of(perturber)])
    assert equal(*ends)


def test_a_base_class_whose_step_raises_inside_is_taken_again():
    class Again(Failing):
        def step(self, closure=None):
            try:
                return super().step(closure)
            except MemoryError:
                return super().step(closure)

    model = net()
    optimizer = Again(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, ARWP)
    optimizer.fails = "before"
    train(model, optimizer)
    assert perturber.step == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_closure_runs_all_passes_after_a_step_that_raised(when):
    model = net()
    optimizer = Failing(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.antithetic_rwp(0.05))
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = loss_fn(model(data()[0]), data()[1])
        calls.append(loss)
        loss.backward()
        return loss

    optimizer.fails = when
    with pytest.raises(MemoryError):
        optimizer.step(closure)
    calls.clear()
    optimizer.step(closure)
    assert (len(calls), perturber.step) == (2, 1)


# ---------------------------------------------------------------------- steps by other hands


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, as SAM is often written."""

    def __init__(self, params, base, **options):
        super().__init__(params, options)
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def second_step(self):
        self.base_optimizer.step()

    def step(self, closure=None):
        self.base_optimizer.step()


@pytest.mark.parametrize(
    "name",
    ["step", "second_step"],
)
def test_a_wrapper_whose_base_optimizer_takes_the_steps(name):
    plain, optimizer, other = attached(ARWP)
    train(plain, optimizer)
    model = net()
    optimizer = Wrapped(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, ARWP)
    train(model, optimizer, take_step=getattr(optimizer, name))
    assert perturber.step == 3
    assert equal(weights_of(model), weights_of(plain))
    assert equal(history_of(perturber), history_of(other))


@torch.no_grad()
def in_place(model):
    for p in model.parameters():
        p.sub_(0.1 * p.grad)
        p.grad = None


def through_data(model):
    for p in model.parameters():
        p.data -= 0.1 * p.grad
        p.grad = None


@pytest.mark.parametrize("update", [in_place, through_data])
@pytest.mark.parametrize("method", [steppe.rwp(0.05), steppe.sam(0.1)], ids=lambda m: m.name)
def test_weights_that_are_updated_by_hand_are_noticed(method, update):
    model, _, perturber = attached(method)
    updates = 0
    with pytest.raises(RuntimeError, match=r"optimizer\.step"):
        for step in range(3):
            perturber.backward(lambda: loss_fn(model(data(step)[0]), data(step)[1]))
            update(model)
            updates += 1
    assert updates <= 2


@pytest.mark.parametrize("update", [in_place, through_data])
def test_an_unchanged_loop_that_updates_by_hand_is_noticed(update):
    model, _, _ = attached(steppe.rwp(0.05))
    updates = 0
    with pytest.raises(RuntimeError, match=r"optimizer\.step"):
        for step in range(3):
            loss_fn(model(data(step)[0]), data(step)[1]).backward()
            update(model)
            updates += 1
    assert updates <= 2


def test_gradients_that_are_thrown_away_are_no_update_by_hand():
    """Three batches in a row are skipped (a bad loss, an overflow); then training goes on."""
    model, optimizer, perturber = attached(steppe.rwp(0.05))
    for step in range(3):
        loss_fn(model(data(step)[0]), data(step)[1]).backward()
        optimizer.zero_grad()
    train(model, optimizer, 2)
    assert perturber.step == 2


def test_loading_weights_between_passes_is_no_update_by_hand():
    model, optimizer, perturber = attached(steppe.rwp(0.05))
    for step in range(3):
        loss_fn(model(data(step)[0]), data(step)[1]).backward()
        model.load_state_dict(net().state_dict())
        optimizer.zero_grad()
    train(model, optimizer, 2)
    assert perturber.step == 2


# ---------------------------------------------------------------------- other weights


def doubled(model):
    return {name: 2 * p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("whole", [True, False], ids=["all weights", "one weight"])
@pytest.mark.parametrize("method", [steppe.rwp(0.05), steppe.m_rwp(0.05)], ids=lambda m: m.name)
def test_a_functional_call_with_other_weights_is_refused(method, whole):
    model, _, perturber = attached(method)
    true = weights_of(model)
    other = {n: w.requires_grad_() for n, w in doubled(model).items() if whole or n == "0.weight"}
    with pytest.raises(RuntimeError, match=r"passes\(\)"):
        torch.func.functional_call(model, other, (data()[0],))
    assert equal(true, weights_of(model))
    assert perturber.stats()["passes_since_step"] == 0


def test_a_functional_call_inside_of_an_explicit_pass_and_without_gradients():
    model, optimizer, perturber = attached(steppe.rwp(0.05))
    x, y = data()
    wanted = torch.func.functional_call(net(), doubled(net()), (x,))
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(model, doubled(net()), (x,)), wanted)
    for run in perturber.passes():
        with run:
            teacher = torch.func.functional_call(model, doubled(net()), (x,))
            (loss_fn(model(x), y) + (model(x) - teacher).square().mean()).backward()
    assert torch.equal(teacher, wanted)
    optimizer.step()
    assert perturber.step == 1


# ---------------------------------------------------------------------- frozen for a while


def freeze(model, frozen):
    for p in model.parameters():
        p.requires_grad_(not frozen)


@pytest.mark.parametrize(
    ("method", "to_input"),
    [
        pytest.param(M_ARWP, True, id="m_arwp, input"),
        pytest.param(M_ARWP, False, id="m_arwp"),
        pytest.param(steppe.rwp(0.05), True, id="rwp, input"),
        pytest.param(steppe.rwp(0.05), False, id="rwp"),
        pytest.param(steppe.sam(0.1), True, id="sam, input"),
        pytest.param(steppe.sam(0.1), False, id="sam"),
    ],
)
def test_a_forward_of_a_frozen_model_is_an_evaluation(method, to_input):
    model, optimizer, perturber = attached(method)
    step_with(perturber, model, optimizer, 0)
    true = weights_of(model)
    freeze(model, True)
    x = data()[0].requires_grad_(to_input)
    output = model(x)
    assert equal(true, weights_of(model))
    if to_input:
        output.square().sum().backward()
        twin = net()
        twin.load_state_dict(model.state_dict())
        (wanted,) = torch.autograd.grad(twin(x).square().sum(), x)
        assert torch.equal(x.grad, wanted)
    assert perturber.stats()["passes_since_step"] == 0
    freeze(model, False)
    step_with(perturber, model, optimizer, 1)
    assert perturber.step == 2


@pytest.mark.parametrize("explicit", [False, True], ids=["hooks", "backward"])
@pytest.mark.parametrize(
    "method",
    [steppe.rwp(0.05), steppe.rwp(rise=0.05), M_ARWP, steppe.m_rwp(0.05, lam=0.3), steppe.sam(0.1)],
    ids=["rwp", "rise", "m_arwp", "m_rwp", "sam"],
)
def test_a_head_without_noise_trains_alone_while_the_rest_is_frozen(method, explicit):
    if method.repeats_batch and not explicit:
        return
    model, optimizer, perturber = attached(method, exclude=("2.*",))
    twin = net()
    trained = sgd(twin[2], 0.1, momentum=0.9)
    freeze(model[0], True)
    for _ in range(3):
        if explicit:
            parts = [data()] * perturber.batches_needed
            perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
        else:
            for _ in method.passes:
                (loss_fn(model(data()[0]), data()[1]) / len(method.passes)).backward()
        loss_fn(twin(data()[0]), data()[1]).backward()
        for each in (optimizer, trained):
            each.step()
            each.zero_grad()
    assert_close(weights_of(model), weights_of(twin))
    freeze(model[0], False)
    step_with(perturber, model, optimizer, 3)
    assert perturber.step == 4
    assert not equal(weights_of(model[0]), weights_of(twin[0]))
