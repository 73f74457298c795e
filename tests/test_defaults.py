"""The strength nobody chose: a rise, the same on every net, and never in place of one that was given."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import steppe
from steppe.schedules import RISE

METHODS = (
    *(steppe.rwp, steppe.arwp, steppe.antithetic_rwp),
    *(steppe.lpf_sgd, steppe.m_rwp, steppe.m_arwp),
)
NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
    "deep": lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)]),
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16)),
}
ids = {"ids": lambda method: method.__name__}


def strengths(method: steppe.Method, net: nn.Module) -> set[tuple[object, object, object]]:
    perturber = steppe.attach(net, torch.optim.AdamW(net.parameters()), method)
    perturber.detach()
    noises = [p.perturbation for p in perturber.method.passes if p.perturbation is not None]
    return {(n.sigma, getattr(n, "ratio", None), n.rise) for n in noises}


@pytest.mark.parametrize("method", METHODS, **ids)
@pytest.mark.parametrize("net", NETS)
def test_no_strength_means_the_same_rise_on_every_net(method, net):
    assert strengths(method(), NETS[net]()) == {(None, None, RISE)}


@pytest.mark.parametrize("options", [{"isotropic": True}, {"elementwise": True}])
def test_other_kinds_of_noise_have_it_too(options):
    method = steppe.rwp if "isotropic" in options else steppe.arwp
    assert strengths(method(**options), NETS["mlp"]()) == {(None, None, RISE)}


@pytest.mark.parametrize("method", METHODS, **ids)
def test_a_strength_that_was_given_is_never_changed(method):
    rising = steppe.cosine_increase(0, 0.5, steps=10)
    for value in (0.7, RISE, rising):
        assert strengths(method(value), NETS["mlp"]()) == {(value, None, None)}
        assert strengths(method(rise=value), NETS["mlp"]()) == {(None, None, value)}
        if method is not steppe.lpf_sgd:
            assert strengths(method(ratio=value), NETS["mlp"]()) == {(None, value, None)}


def test_mixed_keeps_the_strength_of_the_method_it_mixes():
    assert strengths(steppe.mixed(steppe.rwp()), NETS["mlp"]()) == {(None, None, RISE)}
    assert strengths(steppe.mixed(steppe.rwp(ratio=0.7)), NETS["mlp"]()) == {(None, 0.7, None)}


def test_a_printed_perturber_says_what_steers_it():
    net = NETS["mlp"]()
    perturber = steppe.attach(net, torch.optim.SGD(net.parameters(), 0.1), steppe.rwp())
    assert f"steered to a loss rise of {RISE:g}" in str(perturber)


def test_the_docs_have_the_default_of_every_method():
    text = (Path(__file__).parents[1] / "docs" / "choosing.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)\(\)` \|[^|]*\| ([^|]+) \|", text, re.MULTILINE))
    expected = {method.__name__: f"rise {RISE:g}" for method in (*METHODS, steppe.flat_lora)}
    for fixed in (steppe.sam, steppe.asam, steppe.msam):
        expected[fixed.__name__] = f"rho {fixed().passes[-1].perturbation.rho:g}"
    assert table == expected
