"""The strength nobody chose: by kind of model, and never in place of one that was given."""

import pytest
import torch
from torch import nn

import steppe
from steppe.defaults import DEEP, MIXED_RATIOS, RATIOS, uses_attention
from steppe.lab import models

DEFAULTS = {
    steppe.rwp: RATIOS,
    steppe.arwp: RATIOS,
    steppe.antithetic_rwp: RATIOS,
    steppe.m_rwp: MIXED_RATIOS,
    steppe.m_arwp: MIXED_RATIOS,
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


def blocks(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(count)])


SHALLOW_NETS = {
    "mlp": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
    "convolution": nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
    "group norm": nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)),
    "small residual net": models.build("small-resnet", classes=10, shape=(1, 8, 8)),
    "just not deep": blocks(DEEP),
}
DEEP_NETS = {
    "just deep": blocks(DEEP + 1),
    **{
        name: models.build(name, classes=10, shape=(3, 16, 16), width=0.125)
        for name in ("resnet18", "vgg16-bn", "wrn-16-2")
    },
}
ATTENTION_NETS = {
    "encoder layer": nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16)),
    "multihead attention": nn.Sequential(nn.MultiheadAttention(8, 2)),
    "only LayerNorm": HandWritten(),
    "RMSNorm of one's own": nn.Sequential(nn.Linear(8, 8), DecoderRMSNorm()),
    "by name": PlainTransformer(),
}
KINDS = {"shallow": SHALLOW_NETS, "deep": DEEP_NETS, "attention": ATTENTION_NETS}


def ratios(perturber: steppe.Perturber) -> set[object]:
    passes = perturber.method.passes
    return {p.perturbation.ratio for p in passes if isinstance(p.perturbation, steppe.Gaussian)}


def attached_ratios(net: nn.Module, method: steppe.Method) -> set[object]:
    optimizer = torch.optim.AdamW(net.parameters())
    perturber = steppe.attach(net, optimizer, method)
    perturber.detach()
    return ratios(perturber)


@pytest.mark.parametrize("method", DEFAULTS, ids=lambda method: method.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_net_has_a_default_of_its_own(kind, method):
    for net in KINDS[kind].values():
        assert attached_ratios(net, method()) == {getattr(DEFAULTS[method], kind)}


def test_nets_that_bear_less_noise_get_less():
    for ratios in DEFAULTS.values():
        assert ratios.attention < ratios.deep < ratios.shallow


@pytest.mark.parametrize("method", DEFAULTS, ids=lambda method: method.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_strength_that_was_given_is_never_changed(kind, method):
    rising = steppe.cosine_increase(0, 0.5, steps=10)
    for net in KINDS[kind].values():
        for ratio in (0.7, *DEFAULTS[method], rising):
            assert attached_ratios(net, method(ratio=ratio)) == {ratio}
        assert attached_ratios(net, method(0.01)) == {None}


def test_mixed_keeps_the_default_of_the_method_it_mixes():
    attention = ATTENTION_NETS["encoder layer"]
    assert attached_ratios(attention, steppe.mixed(steppe.rwp())) == {RATIOS.attention}
    assert attached_ratios(attention, steppe.mixed(steppe.rwp(ratio=0.7))) == {0.7}


def test_attention_is_seen_through_wrappers():
    assert uses_attention(nn.DataParallel(ATTENTION_NETS["only LayerNorm"]))
    assert uses_attention(torch.compile(ATTENTION_NETS["encoder layer"], backend="eager"))
    assert not uses_attention(torch.compile(SHALLOW_NETS["mlp"], backend="eager"))
