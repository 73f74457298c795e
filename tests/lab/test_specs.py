import pytest
import torch
from torch import nn

import steppe
from steppe.lab.config import Config
from steppe.lab.errors import LabError
from steppe.lab.specs import METHODS, adapted, label, parse
from steppe.schedules import Constant, CosineIncrease


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_reached_and_survives_its_text(name):
    spec = parse(name)
    assert parse(str(spec)) == spec
    method = spec.build(steps=10)
    assert method.name == name.replace("-", "_")
    assert not method.needs_steps


def test_options_fields_and_their_text():
    spec = parse("m_arwp:ratio=.9,lam=.3,same_batch=true,batch=64,weight-decay=1e-3")
    assert spec.options == {"ratio": 0.9, "lam": 0.3, "same_batch": True}
    assert spec.fields == {"batch": 64, "weight_decay": 1e-3}
    config = spec.apply(Config())
    assert (config.batch, config.weight_decay) == (64, 1e-3)
    assert config.method == "m-arwp:ratio=0.9,lam=0.3,same_batch=true"
    assert label(spec) == "m-ARWP (lam 0.3, same_batch true, batch 64, weight_decay 0.001)"
    assert label(parse("sgd"), "adamw") == "AdamW"


def test_digits_of_a_value_are_kept():
    assert parse(str(parse("rwp:sigma=0.123456789"))).options["sigma"] == 0.123456789


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arwq", "No method is called 'arwq'. Did you mean arwp"),
        ("arwp:sgma=1", "No option of arwp is called 'sgma'. Did you mean sigma?"),
        ("arwp:ratio", "write an option as name=value"),
        ("arwp:ratio=-1", "ratio must be finite and at least 0, got -1"),
        ("m-rwp:lam=2", "lam must be in [0, 1], got 2"),
        ("rwp:sigma=.1,ratio=.1", "rwp:sigma=0.1,ratio=0.1"),
        ("rwp:ratio=.6,schedule=cosin", "Did you mean cosine?"),
        ("sgd:method=sam", "sgd has no options, got 'method'"),
    ],
)
def test_mistakes(text, said):
    with pytest.raises(LabError) as error:
        parse(text)
    assert said in str(error.value)


def noise(method):
    return next(p.perturbation for p in method.passes if p.perturbation is not None)


def test_schedules_are_the_papers():
    assert noise(parse("rwp:sigma=.01").build(100)).sigma == steppe.cosine_increase(0, 0.01, 100)
    assert noise(parse("m-rwp:sigma=.015").build(100)).sigma == 0.015
    assert noise(parse("rwp:sigma=.01,schedule=constant").build(100)).sigma in (
        0.01,
        Constant(0.01),
    )
    assert isinstance(noise(parse("m-arwp:schedule=cosine").build(9)).rise, CosineIncrease)


def test_the_default_strength_is_the_functions_own():
    for name in ("rwp", "arwp", "m-rwp", "m-arwp", "lpf-sgd", "antithetic-rwp"):
        own = getattr(steppe, name.replace("-", "_"))()
        assert parse(name).full_strength == ("rise", noise(own).rise)
        assert parse(name).build(50) == own  # ramped by itself, not by the length of training
    assert parse("sgd").full_strength is None
    assert parse("sam").full_strength == ("rho", 0.05)


def test_a_recipes_options_give_way():
    base = parse("m-arwp:sigma=.015,lam=.5,eta=.1")
    assert adapted(base, parse("m-arwp")) == base
    assert adapted(base, parse("m-arwp:lam=.3")).options == {"sigma": 0.015, "lam": 0.3, "eta": 0.1}
    assert adapted(base, parse("m-arwp:ratio=.6")).options == {"lam": 0.5, "eta": 0.1, "ratio": 0.6}


def test_a_spec_trains():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, parse("m-arwp:ratio=.5").build(2))
    batch = (torch.randn(4, 3),)
    loss = perturber.backward(lambda x: model(x).square().mean(), batch, batch)
    assert loss.isfinite()
