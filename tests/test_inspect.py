"""Is it working? print, stats and probe; save and load."""

import io
import math

import pytest
import torch
from torch import nn

import steppe
from tests.nets import batch, conv, equal, images, loss_fn, mlp, weights_of


def attached(method, model=None, **options):
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, steppe.attach(model, optimizer, method, **options)


def test_print_lists_what_is_perturbed_what_is_not_and_why():
    model = mlp()
    model.extra = nn.Parameter(torch.ones(2))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.rwp(ratio=0.6), exclude=["*.bias"])
    assert repr(perturber).splitlines() == [
        "rwp at step 0, strength 0.6: 72 weights of 2 parameters in 11 filters, "
        "expected ‖eps‖/‖w‖ = 0.6",
        "  perturbed  0.weight (8, 6)",
        "  perturbed  2.weight (3, 8)",
        "  left out   extra: not in the optimizer",
        "  left out   frozen: frozen",
        "  left out   0.bias: excluded by '*.bias'",
        "  left out   2.bias: excluded by '*.bias'",
    ]


def test_stats_before_and_after_steps():
    schedule = steppe.linear(0.0, 0.4, steps=4)
    model, optimizer, perturber = attached(steppe.arwp(ratio=schedule, eta=10.0))
    assert perturber.stats()["displacement"] == 0
    assert perturber.stats()["factor"] == 1
    for step in range(2):
        loss_fn(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = perturber.stats()
    assert stats["step"] == 2
    assert stats["strength"] == pytest.approx(0.2)
    assert 0 < stats["factor"] < 1
    assert 0 < stats["displacement"] < 0.2
    assert stats["perturbed_parameters"] == 83


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (steppe.rwp(ratio=0.3), 0.3),
        (steppe.sam(0.1), None),
        (steppe.rwp(0.01, isotropic=True), None),
        (steppe.arwp(0.01, elementwise=True), None),
    ],
)
def test_the_expected_displacement_is_the_one_that_happens(method, expected):
    model, _, perturber = attached(method, nn.Sequential(nn.Linear(50, 200), nn.Linear(200, 3)))
    x, y = batch(0, features=(50,))
    true = weights_of(model)
    for run in perturber.passes():
        with run:
            loss_fn(model(x), y).backward()
            moved = weights_of(model)
    found = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(moved, true, strict=True)))
    size = math.sqrt(sum(float(t.square().sum()) for t in true))
    displacement = perturber.stats()["displacement"]
    # ‖eps‖ of some 10,000 normal values varies by well under 5 %
    assert found / size == pytest.approx(displacement, rel=0.05)
    if expected:
        assert displacement == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("method", [steppe.rwp(0.3), steppe.m_arwp(0.3), steppe.sam(0.3)])
def test_probe_shows_what_perturbation_does_and_leaves_no_trace(method):
    model, optimizer, perturber = attached(method, nn.Sequential(conv(), nn.Dropout(0.2)))
    twin, other, reference = attached(method, nn.Sequential(conv(), nn.Dropout(0.2)))
    x, y = images(0)

    def step(net, opt, perturber, number):
        parts = [images(number + k) for k in range(method.batches_needed)]
        perturber.backward(lambda x, y: loss_fn(net(x), y), *parts)
        opt.step()
        opt.zero_grad()

    for net, opt, perturb in ((model, optimizer, perturber), (twin, other, reference)):
        torch.manual_seed(5)
        step(net, opt, perturb, 0)
        if net is model:
            before = torch.get_rng_state()
            probe = perturber.probe(lambda: loss_fn(model(x), y), samples=6)
            assert torch.equal(before, torch.get_rng_state())
        step(net, opt, perturb, 2)
    assert equal(list(model.state_dict().values()), list(twin.state_dict().values()))
    assert probe.samples == 6
    assert probe.perturbed > probe.true + 2 * probe.stderr
    assert "at the true weights" in str(probe)


def test_probe_of_plain_training_and_bad_samples():
    model, _, perturber = attached(steppe.sgd())
    probe = perturber.probe(lambda: loss_fn(model(batch()[0]), batch()[1]))
    assert probe.perturbed == pytest.approx(probe.true)
    assert probe.stderr == 0
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        perturber.probe(lambda: torch.ones(()), samples=0)
    _, _, perturber = attached(steppe.rwp(0.1))
    assert math.isnan(perturber.probe(lambda: torch.ones(()), samples=1).stderr)


def test_an_error_in_a_probe_leaves_true_weights():
    model, optimizer, perturber = attached(steppe.rwp(0.5))
    true = weights_of(model)
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("planned")
        return torch.ones(())

    with pytest.raises(ValueError, match="planned"):
        perturber.probe(closure)
    assert equal(true, weights_of(model))
    loss_fn(model(batch()[0]), batch()[1]).backward()
    optimizer.step()


# ---------------------------------------------------------------------- save and load


def saved(method, model=None, **options):
    model, optimizer, perturber = attached(method, model, **options)
    parts = [batch(k) for k in range(method.batches_needed)]
    perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(perturber.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_the_state_goes_through_torch_save_with_weights_only():
    state = saved(steppe.m_arwp(0.1))
    _, _, perturber = attached(steppe.m_arwp(0.1), seed=5)
    perturber.load_state_dict(state)
    assert perturber.step == 1
    assert perturber.state_dict()["seed"] == 0
    assert float(perturber.state_dict()["states"][0]["history"][0].max()) > 0


def test_a_state_of_something_else_is_refused_with_nothing_changed():
    cases = [
        (saved(steppe.rwp(0.1)), r"The state is of rwp\(\), but arwp\(\) is attached"),
        (saved(steppe.arwp(0.1, elementwise=True)), "another form than this method's"),
        (saved(steppe.arwp(0.1), exclude=["*.bias"]), "0.weight .* 4 are attached|0.bias"),
        ({"weight": 1}, r"not a state dict of a perturber \(format 1\); its keys are \['weight'\]"),
        (None, "its keys are NoneType"),
    ]
    for state, message in cases:
        _, _, perturber = attached(steppe.arwp(0.1))
        before = repr(perturber.state_dict())
        with pytest.raises(ValueError, match=message):
            perturber.load_state_dict(state)
        assert repr(perturber.state_dict()) == before


def test_a_state_of_another_model_is_refused():
    state = saved(steppe.arwp(0.1))
    other = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    _, _, perturber = attached(steppe.arwp(0.1), other)
    with pytest.raises(
        ValueError, match=r"0.weight \(8, 6\) was saved, 0.weight \(9, 6\) is attached"
    ):
        perturber.load_state_dict(state)


def test_other_settings_of_the_same_method_load_with_a_warning():
    state = saved(steppe.arwp(0.1))
    _, _, perturber = attached(steppe.arwp(0.2))
    with pytest.warns(UserWarning, match="Settings differ from the saved ones"):
        perturber.load_state_dict(state)
    assert perturber.step == 1
