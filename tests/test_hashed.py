"""compile_noise=True: the noise of a hash, added by a compiled kernel."""

import math

import pytest
import torch
from torch import nn

import steppe
from steppe import hashed
from steppe.noise import Draw

PLACES = torch.arange(1_000_000, dtype=torch.int32)


def drawn(number=0, places=PLACES, **draw):
    key = torch.tensor(Draw(**{"seed": 0, "step": 0, **draw}).key(number), dtype=torch.int32)
    return hashed.standard_normal(places, key).double()


def test_values_are_normal():
    values = drawn().sort().values
    n = len(values)
    steps = torch.arange(1, n + 1, dtype=values.dtype) / n
    # Kolmogorov-Smirnov: beyond 1.95/sqrt(n) once in a thousand times
    assert (torch.special.ndtr(values) - steps).abs().max() < 1.95 / math.sqrt(n)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(values.pow(power).mean() - moment) < 4 * math.sqrt(spread / n)
    assert values.abs().max() > 4.4


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 64, 512, 576, 4096, 4608])
def test_neighbours_are_independent(lag):
    values = drawn()
    for a, b in ((values, values), (values.square() - 1, values.square() - 1)):
        a, b = a[:-lag], b[lag:]
        assert abs((a * b).mean() / a.var()) < 4.5 / math.sqrt(len(a))


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"step": 1}, {"stream": 1}, {"replica": 1}, {"number": 1}, {"step": 1000}],
)
def test_other_draws_are_independent(other):
    values, others = drawn(), drawn(**other)
    bound = 4.5 / math.sqrt(len(values))
    assert abs((values * others).mean()) < bound
    assert abs(((values.square() - 1) * (others.square() - 1)).mean() / 2) < bound
    shifted = (values[:-1] * others[1:]).mean()
    assert abs(shifted) < bound


def test_keys_of_a_step_differ():
    keys = {
        tuple(Draw(3, s, t, r).key(n))
        for s in (0, 1)
        for t in (0, 1)
        for r in (0, 1)
        for n in range(99)
    }
    assert len(keys) == 8 * 99
    assert all(-(2**31) <= part < 2**31 for key in keys for part in key)


def test_logarithm_and_cosine_are_right():
    u = (torch.arange(1, 100_001) / 100_001).float()
    tiny = torch.tensor([2.0**-32, 1e-6])
    for x in (u, tiny):
        torch.testing.assert_close(hashed._log(x).double(), x.double().log(), rtol=1e-6, atol=3e-7)
    turns = u - 0.5
    torch.testing.assert_close(
        hashed._cos(turns).double(), (2 * torch.pi * turns.double()).cos(), rtol=0, atol=5e-7
    )


def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 300, 3), nn.BatchNorm2d(300), nn.Flatten(), nn.Linear(300 * 4, 30)
    )
    return model.to(memory_format=torch.channels_last)


def attached(method, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, steppe.attach(model, optimizer, method, compile_noise=True, **options)


def moved(model, perturber):
    """eps of a pass begun by the hooks, as the forward sees it."""
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.zeros(2, 8, 4, 4))
    eps = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    perturber.restore()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return eps


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_kernel_gives_each_filter_its_std_whatever_the_threads(threads):
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        model, _, perturber = attached(steppe.rwp(0.1))
        found.append(moved(model, perturber))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    for eps, param in zip(found[0], model.parameters(), strict=True):
        rows = (eps.flatten(1), param.flatten(1)) if param.dim() > 1 else (eps[None], param[None])
        std = 0.1 * rows[1].detach().norm(dim=1)
        unit = rows[0][std > 0] / std[std > 0, None]
        assert not rows[0][std == 0].any()
        assert not unit.numel() or abs(unit.square().mean() - 1) < 5 * math.sqrt(2 / unit.numel())


def test_two_seeds_and_two_steps_differ_and_a_seed_repeats():
    first, again, other = (
        moved(model, perturber)[0]
        for model, _, perturber in (attached(steppe.arwp(0.1), seed=s) for s in (1, 1, 2))
    )
    assert torch.equal(first, again)
    assert abs(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]) < 0.04


def test_it_trains_and_resumes_bit_for_bit():
    x, y = torch.randn(6, 8, 4, 4), torch.randint(0, 30, (6,))

    def steps(model, optimizer, count):
        for _ in range(count):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, perturber = attached(steppe.arwp(0.05))
    steps(model, optimizer, 2)
    saved = [{k: v.clone() for k, v in model.state_dict().items()}, perturber.state_dict()]
    saved[1]["states"] = [
        {k: [t.clone() for t in v] for k, v in s.items()} for s in saved[1]["states"]
    ]
    steps(model, optimizer, 2)
    other, other_optimizer, resumed = attached(steppe.arwp(0.05))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    steps(other, other_optimizer, 2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_other_noise_than_the_saved_one_warns():
    _, _, compiled = attached(steppe.rwp(0.1))
    model = net()
    plain = steppe.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steppe.rwp(0.1))
    with pytest.warns(UserWarning, match="compiled noise"):
        plain.load_state_dict(compiled.state_dict())


def test_half_precision_and_odd_memory_are_served():
    torch.manual_seed(0)
    model = nn.Module()
    model.small = nn.Parameter(torch.randn(200, 100).bfloat16())
    model.gappy = nn.Parameter(torch.randn(40, 30, 40)[:, :, ::2].detach())
    model.number = nn.Parameter(torch.tensor(2.0))
    model.forward = lambda: model.small.float().sum() + model.gappy.sum() + model.number
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.1), compile_noise=True)
    model()
    for param, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(param, old)
    perturber.restore()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)


def test_a_missing_compiler_is_said(monkeypatch):
    def broken():
        def fail(*_):
            raise ValueError("no compiler here")

        return fail

    monkeypatch.setattr(hashed, "compiled_add", broken)
    with pytest.raises(RuntimeError, match=r"compile_noise=True needs .* no compiler here"):
        attached(steppe.rwp(0.1))


def test_too_large_a_parameter_is_refused():
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(2**31, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="31 bits, and w has 2,147,483,648"):
        steppe.attach(model, optimizer, steppe.rwp(0.1), compile_noise=True)
