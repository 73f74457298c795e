"""A model that is saved, copied or compiled while attached carries nothing of steppe."""

import copy
import importlib
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import steppe
from tests.nets import Dropping, batch, conv, equal, images, loss_fn, mlp, weights_of
from tests.review.loops import sgd

METHODS = {
    "rwp": steppe.rwp(0.05),
    "m_arwp": steppe.m_arwp(0.05),
    "sam": steppe.sam(0.1),
}
NETS = {"mlp": (mlp, batch), "conv": (conv, images)}


def after_training(method, kind="mlp"):
    new, data = NETS[kind]
    model = new()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    for step in range(2):
        parts = [data(10 * step + k) for k in range(method.batches_needed)]
        perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, perturber


def words_of(pickled):
    """The strings of a pickle: names of modules and classes among them."""
    return [str(argument) for _, argument, _ in pickletools.genops(pickled) if argument is not None]


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_nothing_of_steppe_is_in_the_pickle(name, kind):
    model, optimizer, _ = after_training(METHODS[name], kind)
    for thing in (model, optimizer, copy.deepcopy(model), AveragedModel(model)):
        assert not [word for word in words_of(pickle.dumps(thing)) if "steppe" in word]


def test_nothing_of_steppe_is_in_the_pickle_of_a_part():
    model, _, _ = after_training(METHODS["rwp"])
    for part in (model[0], nn.ModuleList(model)):
        assert not [word for word in words_of(pickle.dumps(part)) if "steppe" in word]


class Tracked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.net(x) * self.scale


def traced():
    return torch.fx.symbolic_trace(Tracked())


def traced_part():
    return nn.Sequential(traced(), nn.Linear(3, 3))


def parametrized():
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[0])
    return model


@pytest.mark.parametrize("kind", [traced, traced_part])
def test_a_traced_graph_is_pickled_without_steppe(kind, tmp_path):
    """Its class has a way of its own to be pickled."""
    model = kind()
    ours = len(pickle.dumps(model))
    perturber = steppe.attach(model, sgd(model, momentum=0.9), steppe.rwp(0.5))
    true = weights_of(model)
    loss_fn(model(batch()[0]), batch()[1])  # thrown away
    pickled = pickle.dumps(model)
    assert not [word for word in words_of(pickled) if "steppe" in word]
    assert len(pickled) == ours
    assert equal(weights_of(pickle.loads(pickled)), true)

    loss_fn(model(batch()[0]), batch()[1])
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert equal(weights_of(loaded), true)
    loaded(batch()[0])
    assert equal(weights_of(loaded), true)

    perturber.backward(lambda: loss_fn(model(batch()[0]), batch()[1]))
    perturber.detach()
    assert len(pickle.dumps(model)) == ours


@pytest.mark.parametrize("kind", [traced, traced_part, parametrized])
def test_a_copy_made_in_the_classs_own_way_has_nothing_of_steppe(kind):
    model = kind()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.5))
    true = weights_of(model)
    loss_fn(model(batch()[0]), batch()[1])  # thrown away
    copied = copy.deepcopy(model)
    assert equal(weights_of(copied), true)
    for module in copied.modules():
        found = [v for value in vars(module).values() for v in (value, *table_of(value))]
        assert not [v for v in found if type(v).__module__.startswith("steppe")]
    copied(batch()[0])
    assert equal(weights_of(copied), true)
    loss_fn(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert perturber.step == 1


def test_a_model_whose_parametrization_was_removed_is_saved_and_copied():
    model = parametrized()
    steppe.attach(model, sgd(model), steppe.rwp(0.5))
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    true = weights_of(model)
    for made in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert equal(weights_of(made), true)
        made(batch()[0])
        assert equal(weights_of(made), true)


def table_of(value):
    values = value.values() if isinstance(value, dict) else ()
    return [getattr(v, "hook", v) for v in values]


LOAD = """
import importlib, sys
sys.modules["steppe"] = None
import torch

path, safe = sys.argv[1], sys.argv[2:]
model = torch.load(path, weights_only=False)
print(*[p.double().sum().item().hex() for p in model.parameters()])
known = [getattr(importlib.import_module(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in safe]
with torch.serialization.safe_globals(known):
    again = torch.load(path, weights_only=True)
again.train()(torch.zeros(4, 6)).sum().backward()
print(*[p.double().sum().item().hex() for p in again.parameters()])
"""


def sums_of(model):
    return " ".join(p.double().sum().item().hex() for p in model.parameters())


def test_a_saved_model_loads_where_steppe_is_not_installed(tmp_path):
    model, _, _ = after_training(METHODS["m_arwp"])
    path, plain = tmp_path / "model.pt", tmp_path / "plain.pt"
    torch.save(model, path)
    torch.save(mlp(), plain)
    needed = torch.serialization.get_unsafe_globals_in_checkpoint(plain)
    assert sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)) == sorted(needed)
    found = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), *needed], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == [sums_of(model)] * 2


def test_a_saved_model_loads_with_weights_only(tmp_path):
    model, _, _ = after_training(METHODS["rwp"], "conv")
    torch.save(model, tmp_path / "model.pt")
    torch.save(conv(), tmp_path / "plain.pt")
    needed = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "plain.pt")
    modules = [name.rpartition(".") for name in needed]
    known = [getattr(importlib.import_module(module), name) for module, _, name in modules]
    with torch.serialization.safe_globals(known):
        assert equal(weights_of(torch.load(tmp_path / "plain.pt")), weights_of(conv()))
        loaded = torch.load(tmp_path / "model.pt")
    assert equal(weights_of(loaded), weights_of(model))


def test_a_state_dict_loads_with_weights_only(tmp_path):
    model, optimizer, perturber = after_training(METHODS["m_arwp"])
    for name, thing in {"model": model, "optimizer": optimizer, "perturber": perturber}.items():
        torch.save(thing.state_dict(), tmp_path / name)
        torch.load(tmp_path / name, weights_only=True)
    assert {path.name for path in Path(tmp_path).iterdir()} == {"model", "optimizer", "perturber"}


def hooks_of(model):
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return [hook for m in model.modules() for kind in kinds for hook in getattr(m, kind).values()]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "AveragedModel": lambda model: AveragedModel(model).module,
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_copy_has_no_hook_of_steppe(name, kind):
    model, _, _ = after_training(METHODS[name])
    assert hooks_of(COPIES[kind](model)) == []


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_copy_trains_on_its_own(name, kind):
    model, _, perturber = after_training(METHODS[name], "conv")
    true = weights_of(model)
    other = COPIES[kind](model)
    assert equal(true, weights_of(other))
    optimizer = sgd(other)
    for step in range(2):
        output = other(images(step)[0])
        loss_fn(output, images(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not equal(true, weights_of(other))
    assert equal(true, weights_of(model))
    assert perturber.step == 2


def test_hooks_of_others_survive_in_copies():
    """What the user registered is the user's, before and after attaching."""
    model = mlp()
    model[1].register_forward_hook(halve)
    perturber = steppe.attach(model, sgd(model), steppe.rwp(0.05))
    model[0].register_forward_hook(halve)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert hooks_of(copied).count(halve) == 2
    perturber.detach()
    assert hooks_of(model) == [halve, halve]


def halve(module, args, output):
    return output / 2


@pytest.mark.parametrize("name", METHODS)
def test_an_average_of_weights_follows_true_weights(name):
    method = METHODS[name]
    model, optimizer, perturber = after_training(method)
    average = AveragedModel(model)
    seen = []
    for step in range(3):
        parts = [batch(20 + 10 * step + k) for k in range(method.batches_needed)]
        perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        seen.append([model.state_dict()[key].clone() for key in model.state_dict()])
    wanted = [torch.stack(values).mean(0) for values in zip(*seen, strict=True)]
    for found, value in zip(average.module.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.detach(), value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_compiles_an_attached_model(kind):
    model, optimizer, perturber = after_training(steppe.rwp(0.05), kind)
    data = NETS[kind][1]
    scripted = torch.jit.script(model)
    model.eval()
    scripted.eval()
    with torch.no_grad():
        assert torch.equal(scripted(data()[0]), model(data()[0]))
    model.train()
    true = weights_of(model)
    output = model(data()[0])
    assert not equal(true, weights_of(model)), "the model itself is attached still"
    loss_fn(output, data()[1]).backward()
    optimizer.step()
    assert perturber.step == 3


def test_a_model_with_dropout_resumes_from_a_copy():
    torch.manual_seed(0)
    model = Dropping()
    steppe.attach(model, sgd(model), steppe.rwp(0.05))
    other = copy.deepcopy(model)
    x, y = batch(0, 8, (8, 8), 10)
    perturber = steppe.attach(other, sgd(other), steppe.rwp(0.05))
    loss_fn(other(x), y).backward()
    assert perturber.stats()["passes_since_step"] == 1


SETTINGS = (
    "Method(name='arwp', passes=(Pass(perturbation=AdaptiveGaussian(sigma=0.01, ratio=None, isotropic=False, "
    "eta=0.1, beta=0.99, exponent=0.25), weight=1.0, stream=None, sign=1.0, fresh=False),), feed='one', "
    "same_batch=False, m=None, defaults=None)"
)


def test_a_state_of_version_01_loads():
    """As saved there after two steps; history is in the order of the parameters' filters, as now."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    history = torch.tensor([5.8e-8, 3.8e-10, 1.5e-15, 2.9e-3, 5.6e-4, 4.8e-2, 4.8e-2, 9.4e-3])
    named = [[name, list(param.shape)] for name, param in model.named_parameters()]
    state = {
        "format": 1,
        "method": "arwp",
        "settings": SETTINGS,
        "seed": 7,
        "step": 2,
        "incomplete": 0,
        "parameters": named,
        "states": [{"history": [history]}],
    }
    perturber = steppe.attach(model, sgd(model), steppe.arwp(0.01))
    with pytest.warns(UserWarning, match="drew other noise for a seed") as said:
        perturber.load_state_dict(state)
    assert len(said) == 1
    found = perturber.state_dict()
    assert torch.equal(found["states"][0]["history"][0], history)
    assert (found["step"], found["seed"], found["noise"]) == (2, 7, 2)
