"""Options and arguments: groups as they are now, numbers of numpy, closures, conversions, probes."""

import gc
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import steppe
from steppe.noise import spread
from tests.nets import batch, equal, loss_fn, mlp, weights_of
from tests.review.loops import assert_close, attached, data, grads_of, net, sgd, step_with

# ---------------------------------------------------------------------- groups as they are now


def eps_of(model, perturber, x=None):
    """What a forward adds to the weights."""
    true = weights_of(model)
    model(data()[0] if x is None else x)
    moved = weights_of(model)
    perturber.restore()
    return [a - b for a, b in zip(moved, true, strict=True)]


def grouped(**options):
    model = net()
    groups = [{"params": model[0].parameters(), **options}, {"params": model[2].parameters()}]
    optimizer = sgd(groups)
    return model, optimizer, steppe.attach(model, optimizer, steppe.rwp(0.05))


@pytest.mark.parametrize("loads", [False, True])
def test_strength_of_the_current_group_counts(loads):
    full = eps_of(*grouped()[::2])
    model, optimizer, perturber = grouped(strength=1.0)
    if loads:
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["strength"] = 0.5
    found = eps_of(model, perturber)
    assert_close(found[:2], [e / 2 for e in full[:2]], atol=1e-15)
    assert_close(found[2:], full[2:])


def test_strength_that_was_loaded_counts():
    _, saved, _ = grouped(strength=0.0)
    model, optimizer, perturber = grouped()
    optimizer.load_state_dict(saved.state_dict())
    found = eps_of(model, perturber)
    assert float(found[0].abs().max()) == 0
    assert float(found[2].abs().max()) > 0


@pytest.mark.parametrize("loads", [False, True])
def test_perturb_of_the_current_group_counts(loads):
    model, optimizer, perturber = grouped()
    if loads:
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["perturb"] = False
    found = eps_of(model, perturber)
    assert float(found[0].abs().max()) == 0
    assert float(found[2].abs().max()) > 0
    assert "0.weight: perturb=False in its group" in repr(perturber)


def later(method):
    """The second layer joins the optimizer after the model was attached."""
    model = net()
    optimizer = sgd(model[0])
    perturber = steppe.attach(model, optimizer, method)
    optimizer.add_param_group({"params": model[2].parameters()})
    return model, optimizer, perturber


def test_a_group_that_is_added_later_gets_the_weighted_sum():
    lam = 0.3
    model, _, _ = later(steppe.m_rwp(0.0, lam=lam))
    for part in range(2):
        (loss_fn(model(data(part)[0]), data(part)[1]) / 2).backward()
    plain = net()
    for part in range(2):
        (
            2 * (lam if part else 1 - lam) * loss_fn(plain(data(part)[0]), data(part)[1]) / 2
        ).backward()
    assert_close(grads_of(model), grads_of(plain))


def test_a_group_that_is_added_later_is_listed():
    _, _, perturber = later(steppe.rwp(0.05))
    (line,) = [line for line in repr(perturber).splitlines() if "2.weight" in line]
    assert "not in the optimizer" not in line


def test_a_submodule_called_module_keeps_its_name():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.weight = net(), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.module(x) * self.weight

    model, _, perturber = attached(steppe.rwp(0.05), model=Holder())
    shown = repr(perturber).splitlines()
    for name, _ in model.named_parameters():
        assert any(f"perturbed  {name} " in line for line in shown)
    perturber.detach()
    _, _, perturber = attached(steppe.rwp(0.05), model=model, exclude="module.*")
    assert perturber.stats()["perturbed_parameters"] == 3


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_a_seed_of_numpy(kind):
    ends = []
    for seed in (kind(7), 7):
        model, optimizer, perturber = attached(steppe.rwp(0.05), seed=seed)
        step_with(perturber, model, optimizer, 0)
        assert type(perturber.state_dict()["seed"]) is int, "loads with weights_only=True"
        ends.append(weights_of(model))
    assert equal(*ends)


def test_a_seed_of_true_is_refused():
    with pytest.raises(TypeError, match="seed"):
        attached(steppe.rwp(0.05), seed=True)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_strengths_of_numpy(kind):
    ends = []
    for value in (kind(0.25), 0.25):
        model = net()
        optimizer = sgd([{"params": model.parameters(), "strength": value}])
        perturber = steppe.attach(model, optimizer, steppe.m_arwp(value, lam=value))
        step_with(perturber, model, optimizer, 0)
        perturber.detach()
        perturber = steppe.attach(model, optimizer, steppe.sam(value))
        step_with(perturber, model, optimizer, 1)
        ends.append(weights_of(model))
    assert equal(*ends)


def test_a_schedule_that_gives_numbers_of_numpy():
    ends = []
    for kind in (np.float32, float):
        model, optimizer, perturber = attached(steppe.rwp(lambda step: kind(0.25)))
        step_with(perturber, model, optimizer, 0)
        ends.append(weights_of(model))
    assert equal(*ends)


def test_a_schedule_without_a_name_resumes_without_a_warning():
    schedules = [lambda step: 0.05, lambda step: 0.05]
    model, optimizer, perturber = attached(steppe.rwp(schedules[0]))
    step_with(perturber, model, optimizer, 0)
    _, _, resumed = attached(steppe.rwp(schedules[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(perturber.state_dict())
    assert resumed.step == 1


def test_another_strength_resumes_with_a_warning():
    _, _, perturber = attached(steppe.rwp(0.05))
    _, _, resumed = attached(steppe.rwp(0.06))
    with pytest.warns(UserWarning, match="0.06"):
        resumed.load_state_dict(perturber.state_dict())


# ---------------------------------------------------------------------- closures, conversions


@pytest.mark.parametrize("method", [steppe.rwp(0.05), steppe.sam(0.1)], ids=lambda m: m.name)
def test_a_closure_that_returns_none(method):
    ends = []
    for returns in (True, False):
        model, optimizer, _ = attached(method)

        def closure():
            optimizer.zero_grad()
            loss = loss_fn(model(data()[0]), data()[1])
            loss.backward()
            return loss if returns else None

        loss = optimizer.step(closure)
        assert (loss is None) == (not returns)
        ends.append(weights_of(model))
    assert equal(*ends)


@pytest.mark.parametrize(
    "method", [steppe.rwp(0.05), steppe.m_arwp(0.05), steppe.sam(0.1)], ids=lambda m: m.name
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_model_that_changes_its_dtype_after_attach_is_refused(method, trained):
    model = mlp()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    if trained:
        parts = [batch(k) for k in range(method.batches_needed)]
        perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
        optimizer.step()
        optimizer.zero_grad()
    true = weights_of(model)
    with pytest.raises(RuntimeError, match="(?is)attach.* after|after.* attach"):
        model.double()
        perturber.backward(
            lambda x, y: loss_fn(model(x), y), *[data(k) for k in range(method.batches_needed)]
        )
    assert equal([w.double() for w in true], [w.double() for w in weights_of(model)])


# ---------------------------------------------------------------------- a look, and the end


@dataclass(frozen=True)
class Doubling(steppe.Perturbation):
    """The least that a perturbation must say."""

    def strength(self, step):
        return 1.0

    def move(self, weights, state, draw, gradient):
        weights.add_noise(draw, 0.1 * weights.filter_norms())


def test_print_shows_a_perturbation_that_does_not_know_its_radius():
    _, _, perturber = attached(steppe.Method("doubling", (steppe.Pass(Doubling()),)))
    assert "doubling" in repr(perturber)
    assert "perturbed  0.weight (8, 6)" in repr(perturber)


@pytest.mark.parametrize(
    "method", [steppe.rwp(0.05), steppe.arwp(0.05), steppe.m_rwp(0.05)], ids=lambda m: m.name
)
def test_a_first_probe_in_inference_mode_changes_nothing(method):
    ends = []
    for probes in (False, True):
        model, optimizer, perturber = attached(method)
        if probes:
            with torch.inference_mode():
                found = perturber.probe(lambda: loss_fn(model(data()[0]), data()[1]))
            assert found.perturbed != found.true
        for step in range(2):
            step_with(perturber, model, optimizer, step)
        ends.append(weights_of(model))
    assert equal(*ends)


def live_bytes():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("method", [steppe.rwp(0.05), steppe.sam(0.1)], ids=lambda m: m.name)
def test_detach_lets_go_of_backup_and_model(method):
    model = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300), nn.Linear(300, 3)).double()
    size, before = sum(p.numel() * 8 for p in model.parameters()), live_bytes()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    step_with(perturber, model, optimizer, 0)
    held = live_bytes() - before
    perturber.detach()
    kept = live_bytes() - before
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert held > size / 2, "a backup is as large as the model"
    assert kept < size / 2
    assert alive() is None


@pytest.mark.parametrize("threads", [1, 2])
def test_an_index_error_of_the_work_itself_is_raised(threads):
    def work(item):
        if item == 3:
            raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):
        spread(work, range(4), threads)
