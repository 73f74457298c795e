"""The strength nobody chose: by kind of model, and never in place of one that was given."""

import pytest
import torch
from torch import nn

import steppe
from steppe.methods import MIXED_RATIO, RATIO, uses_attention

DEFAULTS = {
    steppe.rwp: RATIO,
    steppe.arwp: RATIO,
    steppe.antithetic_rwp: RATIO,
    steppe.m_rwp: MIXED_RATIO,
    steppe.m_arwp: MIXED_RATIO,
}


class HandWritten(nn.Module):
    """Attention without a module of its own: only the norm gives it away."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)


class DecoderRMSNorm(nn.Module):
    """As language models bring their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


class PlainTransformer(nn.Module):
    """Neither norm nor attention as modules, but a name that says it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)


GENERAL_NETS = {
    "mlp": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
    "convolution": nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
    "group norm": nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)),
}
ATTENTION_NETS = {
    "encoder layer": nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16)),
    "multihead attention": nn.Sequential(nn.MultiheadAttention(8, 2)),
    "only LayerNorm": HandWritten(),
    "RMSNorm of one's own": nn.Sequential(nn.Linear(8, 8), DecoderRMSNorm()),
    "by name": PlainTransformer(),
}


def ratios(perturber: steppe.Perturber) -> set[object]:
    passes = perturber.method.passes
    return {p.perturbation.ratio for p in passes if isinstance(p.perturbation, steppe.Gaussian)}


def attached_ratios(net: nn.Module, method: steppe.Method) -> set[object]:
    optimizer = torch.optim.AdamW(net.parameters())
    perturber = steppe.attach(net, optimizer, method)
    perturber.detach()
    return ratios(perturber)


@pytest.mark.parametrize("method", DEFAULTS, ids=lambda method: method.__name__)
@pytest.mark.parametrize("net", GENERAL_NETS)
def test_most_nets_get_the_general_default(net, method):
    assert attached_ratios(GENERAL_NETS[net], method()) == {DEFAULTS[method][0]}


@pytest.mark.parametrize("method", DEFAULTS, ids=lambda method: method.__name__)
@pytest.mark.parametrize("net", ATTENTION_NETS)
def test_nets_with_attention_get_a_default_of_their_own(net, method):
    assert attached_ratios(ATTENTION_NETS[net], method()) == {DEFAULTS[method][1]}
    assert DEFAULTS[method][1] < DEFAULTS[method][0]


@pytest.mark.parametrize("method", DEFAULTS, ids=lambda method: method.__name__)
@pytest.mark.parametrize("net", GENERAL_NETS | ATTENTION_NETS)
def test_a_strength_that_was_given_is_never_changed(net, method):
    model = (GENERAL_NETS | ATTENTION_NETS)[net]
    rising = steppe.cosine_increase(0, 0.5, steps=10)
    general, attention = DEFAULTS[method]
    for ratio in (0.7, general, attention, rising):
        assert attached_ratios(model, method(ratio=ratio)) == {ratio}
    assert attached_ratios(model, method(0.01)) == {None}


def test_mixed_keeps_the_default_of_the_method_it_mixes():
    attention = ATTENTION_NETS["encoder layer"]
    assert attached_ratios(attention, steppe.mixed(steppe.rwp())) == {RATIO[1]}
    assert attached_ratios(attention, steppe.mixed(steppe.rwp(ratio=0.7))) == {0.7}


def test_attention_is_seen_through_wrappers():
    assert uses_attention(nn.DataParallel(ATTENTION_NETS["only LayerNorm"]))
    assert uses_attention(torch.compile(ATTENTION_NETS["encoder layer"], backend="eager"))
    assert not uses_attention(torch.compile(GENERAL_NETS["mlp"], backend="eager"))
