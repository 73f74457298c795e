"""Noise: its distribution, its independence, and what it may and may not depend on."""

import math
import os
import time

import pytest
import torch
from torch import nn

import steppe
from steppe import noise
from steppe.noise import Draw, spread
from tests.nets import equal, weights_of


def eps_of(model, method, *, step=0, seed=0, stream=0):
    """The perturbation a method adds, read off the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, method, seed=seed)
    before = weights_of(model)
    perturber._training.move(0, Draw(seed, step, stream))
    after = weights_of(model)
    perturber.detach()
    assert equal(before, weights_of(model))
    return [b - a for a, b in zip(before, after, strict=True)]


def wide_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(64, 6, 5), nn.Conv2d(6, 3, 1), nn.LayerNorm(2000)).double()
    with torch.no_grad():
        net[2].weight.uniform_(0.5, 1.5)
        net[2].bias.uniform_(-1, 1)
    return net


@pytest.mark.parametrize("kind", ["sigma", "ratio", "isotropic", "adaptive"])
def test_std_of_each_filter_is_the_formula(kind):
    net, strength, exponent = wide_net(), 0.3, 0.25
    if kind == "adaptive":
        method = steppe.arwp(strength, eta=2.0)
    elif kind == "isotropic":
        method = steppe.rwp(strength, isotropic=True)
    else:
        method = steppe.rwp(**{kind: strength})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    perturber = steppe.attach(net, optimizer, method)
    engine = perturber._training
    if kind == "adaptive":
        (state,) = engine.states.values()
        state["history"][0].copy_(torch.linspace(0, 5, engine.weights.filters))
    before = weights_of(net)
    draws = 40
    sums = [torch.zeros(p.shape[0] if p.dim() > 1 else 1, dtype=p.dtype) for p in before]
    for step in range(draws):
        engine.move(0, Draw(0, step))
        for total, a, p in zip(sums, before, net.parameters(), strict=True):
            squares = (p.detach() - a).square()
            total += squares.flatten(1).sum(1) if p.dim() > 1 else squares.sum()
        engine.restore()
    first = 0
    for total, p in zip(sums, before, strict=True):
        size = p[0].numel() if p.dim() > 1 else p.numel()
        norms = p.flatten(1).norm(dim=1) if p.dim() > 1 else p.norm().reshape(1)
        std = {
            "sigma": strength * norms,
            "ratio": strength / math.sqrt(size) * norms,
            "isotropic": torch.full_like(norms, strength),
            "adaptive": strength * norms,
        }[kind]
        if kind == "adaptive":
            history = torch.linspace(0, 5, engine.weights.filters, dtype=p.dtype)
            std = std * (1 + 2.0 * history[first : first + len(norms)]) ** -exponent
        first += len(norms)
        n = draws * size
        found = (total / n).sqrt()
        # the relative error of a std from n normal values is 1/sqrt(2n); 5 of those is rare
        assert ((found / std - 1).abs() < 5 / math.sqrt(2 * n)).all()


def correlation(a, b):
    return float((a * b).mean() / (a.std() * b.std()))


def test_filters_steps_streams_and_seeds_are_independent():
    net = wide_net()
    bound = 5 / math.sqrt(1600)
    base = eps_of(net, steppe.rwp(0.1))[0].flatten(1)
    for i in range(len(base)):
        for j in range(i):
            assert abs(correlation(base[i], base[j])) < bound
    for other in ({"step": 1}, {"seed": 1}, {"stream": 1}):
        found = eps_of(net, steppe.rwp(0.1), **other)[0].flatten(1)
        assert abs(correlation(base.flatten(), found.flatten())) < 5 / math.sqrt(base.numel())
    assert equal([base], [eps_of(net, steppe.rwp(0.1))[0].flatten(1)])


def test_values_are_normal():
    eps = eps_of(wide_net(), steppe.rwp(1.0, isotropic=True))
    values = torch.cat([e.flatten() for e in eps]).sort().values
    n = len(values)
    cdf = torch.special.ndtr(values)
    steps = torch.arange(1, n + 1, dtype=values.dtype) / n
    # Kolmogorov-Smirnov: beyond 1.95/sqrt(n) once in a thousand times
    assert (cdf - steps).abs().max() < 1.95 / math.sqrt(n)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_noise_does_not_depend_on_the_number_of_threads(threads):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(700, 500), nn.Linear(500, 300))
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(eps_of(net, steppe.rwp(0.1)))
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


def test_block_seeds_of_a_step_never_collide():
    seeds = set()
    for stream in range(3):
        for replica in range(3):
            seed_of = Draw(5, 7, stream, replica).block_seeds(1000)
            seeds |= {seed_of(block) for block in range(1000)}
    assert len(seeds) == 9000
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_global_random_state_is_untouched():
    net = wide_net()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    eps_of(net, steppe.rwp(0.1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_work_is_spread_over_threads_and_each_item_done_once(threads):
    done = []
    spread(done.append, range(500), threads)
    assert sorted(done) == list(range(500))
    spread(done.append, [], threads)


@pytest.mark.parametrize("error", [ValueError, IndexError, KeyboardInterrupt])
def test_after_an_error_no_thread_works_on(error):
    working, begun = set(), []

    def work(item):
        begun.append(item)
        working.add(item)
        time.sleep(0.001)
        working.remove(item)
        if item == 5:
            raise error("planned")

    with pytest.raises(error, match="planned"):
        spread(work, range(500), threads=2)
    assert not working
    assert len(begun) < 20


def test_a_forked_child_gets_threads_of_its_own(monkeypatch):
    asked = []
    pool = noise._pool(os.getpid(), 2)
    monkeypatch.setattr(noise, "_pool", lambda *of: asked.append(of) or pool)
    spread(lambda _: None, range(4), threads=2)
    monkeypatch.setattr(noise.os, "getpid", lambda: -1)
    spread(lambda _: None, range(4), threads=2)
    assert asked[-1] == (-1, 2) != asked[0]


def test_channels_last_weights_get_the_right_noise():
    torch.manual_seed(0)
    net = nn.Conv2d(8, 4, 3).to(memory_format=torch.channels_last)
    eps = eps_of(net, steppe.rwp(0.1))[0]
    norms = net.weight.detach().flatten(1).norm(dim=1)
    found = eps.flatten(1).std(dim=1) / norms
    assert ((found / 0.1 - 1).abs() < 5 / math.sqrt(2 * 72)).all()
    assert net.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_transposed_parameter_is_perturbed_by_its_own_rows():
    torch.manual_seed(0)
    net = nn.Module()
    net.w = nn.Parameter(torch.randn(400, 3).t())
    with torch.no_grad():
        net.w[0] *= 100
    eps = eps_of(net, steppe.rwp(0.1))[0]
    found = eps.std(dim=1) / net.w.detach().norm(dim=1)
    assert ((found / 0.1 - 1).abs() < 5 / math.sqrt(800)).all()
