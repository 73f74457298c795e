"""Strength by the loss rise: the rule by itself, and at work in a loop."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steppe
from steppe.schedules import LEAST, OPENING, Steering
from tests.nets import batch, conv, equal, images, loss_fn, mlp, weights_of


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


STEADY = steppe.constant(0.05)


def on_a_quadratic(trace, start, steps, rise=0.05, size=100, seed=0, change=1.0):
    """r of each step over its closed form, sqrt(2 rise / tr H), at the minimum of a quadratic."""
    generator = torch.Generator().manual_seed(seed)
    diagonal = torch.rand(size, generator=generator, dtype=torch.float64)
    diagonal *= trace / diagonal.sum()
    steering = Steering(steppe.constant(rise), bound=math.inf)
    state = steering.init(torch.zeros((), dtype=torch.float64))
    state[4] = state[11] = start * math.sqrt(2 * rise / trace)
    found = []
    for step in range(steps):
        if step == steps // 2:
            diagonal, trace = diagonal * change, trace * change
        r = steering.factor(state)
        eps = r * torch.randn(size, generator=generator, dtype=torch.float64)
        steering.update(state, (eps * (diagonal * eps)).sum(), torch.ones(()), step)
        found.append(float(r) / math.sqrt(2 * rise / trace))
    return found


@pytest.mark.parametrize("trace", [1e-3, 1e-1, 1e1, 1e3])
@pytest.mark.parametrize("start", [0.01, 1.0, 100.0])
def test_on_a_quadratic_r_converges_to_the_closed_form(trace, start):
    found = on_a_quadratic(trace, start, steps=250)
    assert sum(found[200:]) / 50 == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("change", [0.1, 10.0])
def test_r_follows_a_change_of_curvature(change):
    found = on_a_quadratic(1.0, 1.0, steps=900, change=change)
    assert sum(found[-50:]) / 50 == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("low", [0.0, 1e-12])
@pytest.mark.parametrize("rests", [0, 200, 5000])
def test_a_schedule_may_ask_for_nothing_for_a_while(low, rests):
    """Taken as written: what is asked afterwards is there as soon as after a start without it."""
    steering = Steering(lambda step: low if step < rests else 0.02, bound=math.inf)
    state = steering.init(torch.zeros((), dtype=torch.float64))
    for step in range(rests + 200):
        r = steering.factor(state)
        moved = r if steering.asked(step) else 0 * r
        steering.update(state, moved * moved, torch.ones(()), step)  # H = 1: r is sqrt(2 rise)
        if step == rests - 1:
            assert steering.read(state, step).ratio == pytest.approx(LEAST if low else 0)
    assert float(steering.factor(state)) == pytest.approx(0.2, rel=1e-3)
    assert steering.read(state, step).measured_rise == pytest.approx(0.02, rel=0.2)


def saturated(bound, steps=600):
    """r of each step and what was said: S = 2 r² exp(-r²) has its largest value, 2/e, at r = 1, so that a
    rise of 2 is never reached."""
    steering = Steering(steppe.constant(2.0), bound=bound)
    state = steering.init(torch.zeros((), dtype=torch.float64))
    found, halvings = [], 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, steps + 1):
            r = steering.factor(state)
            found.append(float(r))
            steering.update(state, 2 * r * r * (-r * r).exp(), torch.ones(()), step)
            if step % 100 == 0:
                halvings = steering.warn(state, step, halvings)
    return found, halvings, [str(w.message) for w in said]


def test_a_loss_that_saturates_does_not_drive_r_away():
    """It stops where the curvature falls; unguarded it grows by 5 % a step for ever."""
    found, _, _ = saturated(math.inf)
    assert max(found) == found[200] == found[-1] < 50


def test_a_loss_that_saturates_halves_r_at_the_bound_and_says_so():
    found, halvings, said = saturated(0.5)
    assert max(found) == 0.5
    assert min(found[found.index(0.5) :]) == pytest.approx(0.25, rel=0.06)
    assert halvings >= 1
    assert any("cannot be held" in words for words in said)


@pytest.mark.parametrize(
    ("slope", "pull", "says"), [(0.02, 0.1, 0), (1e-4, 0.1, 1), (0.02, 0.9, 1)]
)
def test_a_flat_net_at_the_bound_is_not_warned_about(slope, pull, says):
    """Unless the rise has another unit, or the noise keeps the net from learning."""
    steering = Steering(0.05)
    state = steering.init(torch.zeros(()))
    for step in range(1, 401):
        r = steering.factor(state)
        pulls = torch.tensor(1.0 if step <= 10 else pull)
        steering.update(state, slope * r * r / 0.25, pulls, step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert steering.warn(state, 400, 0) > 0
    assert len(caught) == says


def test_a_step_that_is_not_finite_changes_nothing():
    steering = Steering(0.05)
    state = steering.init(torch.zeros(()))
    for value in (1.0, 2.0):
        steering.factor(state)
        steering.update(state, torch.tensor(value), torch.ones(()), 0)
    before = state.clone()
    for slope, pull in ((torch.nan, 1.0), (torch.inf, 1.0), (1.0, torch.nan)):
        steering.update(state, torch.tensor(slope), torch.tensor(pull), 1)
    assert torch.equal(before, state)


def test_the_ramp_opens_as_the_pull_lets_off():
    steering = Steering(0.05)
    state = steering.init(torch.zeros(()))
    for step in range(OPENING):
        assert float(steering.ramp(state)) == 0
        assert float(steering.factor(state)) == pytest.approx(LEAST)
        steering.update(state, torch.ones(()), torch.full((), 2.0), step)
    assert float(steering.ramp(state)) == 0
    for step in range(1000):
        steering.update(state, torch.ones(()), torch.full((), 0.5), step)
    assert float(steering.ramp(state)) == pytest.approx(0.75**2, rel=1e-3)
    assert float(Steering(steppe.constant(0.05)).ramp(state)) == 1


def train(method, steps=60, *, model=None, parts=1, data=batch, scaler=None, lr=0.1, **options):
    model = model or mlp()
    optimizer = sgd(model, lr)
    perturber = steppe.attach(model, optimizer, method, scaler=scaler, **options)
    for step in range(steps):
        x, y = data(step % 5)
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = loss_fn(model(xs), ys) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return model, perturber


def steering_of(perturber):
    (state,) = perturber.state_dict()["states"]
    return state["steering"][0]


def test_it_is_measured_and_shown():
    _, perturber = train(steppe.rwp(rise=STEADY), 250)
    stats = perturber.stats()
    assert stats["rise"] == 0.05
    assert stats["ramp"] == 1
    assert abs(stats["measured_rise"] - 0.05) < 4 * stats["measured_rise_stderr"]
    assert stats["measured_rise_stderr"] < 0.03
    assert stats["displacement"] == pytest.approx(stats["ratio"], rel=1e-3)
    assert "steered to a loss rise of 0.05 (ramp 1, measured 0.0" in repr(perturber)


@pytest.mark.parametrize("method", [steppe.rwp, steppe.arwp, steppe.lpf_sgd])
@pytest.mark.parametrize("zero", [0, lambda step: 0.0])
@pytest.mark.parametrize(("net", "data"), [(mlp, batch), (conv, images)])
def test_rise_zero_is_the_run_without_steppe(method, zero, net, data):
    """Statistics of BatchNorm and the count of their updates as well."""
    method = method(rise=zero)
    parts = len(method.passes)
    model, _ = train(method, 20, model=net(), data=data, parts=parts)
    plain = net()
    optimizer = sgd(plain)
    for step in range(20):
        x, y = data(step % 5)
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (loss_fn(plain(xs), ys) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert equal(model.state_dict().values(), plain.state_dict().values())


def test_accumulation_gives_the_same_r():
    found = [steering_of(train(steppe.rwp(rise=STEADY), parts=parts)[1]) for parts in (1, 4)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


def test_a_scaler_gives_the_same_r():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10**6)
    for method in (steppe.rwp(rise=0.05), steppe.arwp(rise=STEADY)):
        found = [steering_of(train(method, scaler=s)[1]) for s in (None, scaler)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def maximizing(maximize, method, steps=60, frozen=()):
    """What is measured where groups maximize: all, the last layer alone (a two-player game: its loss is
    the objective with a minus) or none."""
    model = mlp()
    model[0].requires_grad_(not frozen)
    groups = [
        {"params": part.parameters(), "maximize": own}
        for part, own in zip((model[0], model[2]), maximize, strict=True)
    ]
    optimizer = torch.optim.SGD(groups[bool(frozen) :], lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, method, include_frozen=frozen)
    for step in range(steps):
        x, y = batch(step % 5)
        loss = loss_fn(model(x), y)
        if method.batches_needed > 1:
            (-loss / 2 if all(maximize) else loss / 2).backward()
            loss = loss_fn(model(x), y) / 2
        (-loss if all(maximize) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), perturber.state_dict()["states"]


@pytest.mark.parametrize(
    ("method", "frozen"),
    [(steppe.rwp, ()), (steppe.m_arwp, ()), (steppe.rwp, ("0.weight",))],
)
def test_an_optimizer_that_maximizes_the_negative_loss_gives_the_same_r(method, frozen):
    method = method(rise=STEADY)
    weights, states = maximizing((False, False), method, frozen=frozen)
    others, same = maximizing((True, True), method, frozen=frozen)
    assert equal(weights, others)
    assert equal(*([t for s in x for ts in s.values() for t in ts] for x in (states, same)))


def test_each_group_is_measured_on_its_own_loss():
    """At a fixed eps: the slope of a group that maximizes counts with the other sign."""
    found = []
    for maximize in ((False, False), (False, True)):
        _, (state,) = maximizing(maximize, steppe.rwp(rise=STEADY), steps=1)
        found.append(float(state["steering"][0][0]) / 0.02)
    model, seen = mlp(), []
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp(rise=STEADY))
    true = weights_of(model)
    with next(perturber.passes()):
        x, y = batch(0)
        loss_fn(model(x), y).backward()
        seen = [
            float(((p.detach() - t) * p.grad).sum())
            for p, t in zip(model.parameters(), true, strict=True)
        ]
    assert found[0] == pytest.approx(sum(seen), rel=1e-4)
    assert found[1] == pytest.approx(sum(seen[:2]) - sum(seen[2:]), rel=1e-4)


def test_a_scaler_that_was_not_announced_is_refused():
    model = mlp()
    optimizer = sgd(model)
    steppe.attach(model, optimizer, steppe.rwp(rise=0.05))
    scaler = torch.amp.GradScaler("cpu")
    true = weights_of(model)
    scaler.scale(loss_fn(model(batch()[0]), batch()[1])).backward()
    with pytest.raises(RuntimeError, match=r"attach\(\.\.\., scaler=scaler\)"):
        scaler.step(optimizer)
    assert equal(true, weights_of(model))


class Tied(nn.Module):
    """Two layers with one weight, a frozen one, and one that nothing goes through."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(6, 6, bias=False) for _ in range(2))
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused, self.last = nn.Linear(2, 2), nn.Linear(6, 3)
        self.to(dtype)

    def forward(self, x):
        hidden = self.frozen(self.second(self.first(x).tanh()))
        return self.last(hidden.tanh())


def slope_at(here, true, x, y, dtype):
    """<eps, g> of the perturbed weights `here`, by a twin that steppe knows nothing of."""
    twin = Tied(dtype)
    with torch.no_grad():
        for p, value in zip(twin.parameters(), here, strict=True):
            p.copy_(value)
    loss_fn(twin(x), y).backward()
    trios = zip(here, true, twin.parameters(), strict=True)
    found = [((a.double() - b.double()) * p.grad).sum() for a, b, p in trios if p.grad is not None]
    return float(torch.stack(found).sum())


HALF = {"strength": 0.5}


@pytest.mark.parametrize("make", [steppe.rwp, steppe.m_rwp])
@pytest.mark.parametrize(
    ("group", "parts", "clip", "scaled", "compiled", "dtype"),
    [
        ({}, 1, None, False, False, torch.float64),
        ({}, 3, 0.01, False, False, torch.float64),
        ({}, 2, 0.01, True, False, torch.float64),
        (HALF, 1, None, False, True, torch.float64),
        (HALF, 2, 0.01, True, False, torch.bfloat16),
    ],
    ids=["plain", "clipped", "scaled", "compiled and strength=", "bf16 and all"],
)
def test_the_measure_is_that_of_a_twin(make, group, parts, clip, scaled, compiled, dtype):
    """With tied, frozen and unused parameters: the sums of <eps, g> and r² against ones by hand."""
    torch._dynamo.reset()
    method, model = make(rise=STEADY), Tied(dtype)
    groups = [
        {"params": list(model.last.parameters()), **group},
        {"params": [*model.first.parameters(), *model.frozen.parameters()]},
        {"params": list(model.unused.parameters())},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=3, enabled=scaled)
    perturber = steppe.attach(called, optimizer, method, scaler=scaler if scaled else None)
    num = den = 0.0
    passes = len(method.passes)
    for step in range(8):
        true, slopes, r = weights_of(model), [], perturber.stats()["ratio"]
        for part in range(parts * passes):
            x, y = batch(100 * step + part, dtype=dtype)
            loss = loss_fn(called(x), y) / (parts * passes)
            here = weights_of(model)
            scaler.scale(loss).backward()
            if not equal(here, true):
                slopes.append(slope_at(here, true, x, y, dtype))
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert len(slopes) == parts
        num, den = 0.98 * num + 0.02 * sum(slopes) / parts, 0.98 * den + 0.02 * r * r
    found = steering_of(perturber)
    rel = 1e-2 if dtype == torch.bfloat16 else 1e-9
    assert [float(found[0]), float(found[1])] == pytest.approx([num, den], rel=rel)


@pytest.mark.parametrize("method", [steppe.rwp, steppe.m_arwp])
def test_an_overflow_leaves_no_trace(method):
    """A step that the scaler skips: everything is as without it."""

    def run(overflows):
        model = mlp()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6)
        perturber = steppe.attach(model, optimizer, method(rise=STEADY), scaler=scaler)
        for step in range(24):
            bad = [math.inf] if overflows and step % 4 == 2 else []
            for factor in (*bad, 1.0):
                for part in range(2):
                    x, y = batch(2 * step + part)
                    scaler.scale(loss_fn(model(factor * x), y) / 2).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        (state,) = perturber.state_dict()["states"]
        return weights_of(model) + [t for tensors in state.values() for t in tensors]

    assert equal(run(False), run(True))


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, y):
        logits = self.net(x)
        return {"loss": loss_fn(logits, y), "logits": logits}


def test_a_model_that_returns_its_loss_too_gives_the_same_r():
    _, plain = train(steppe.rwp(rise=0.05))
    model = WithLoss()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp(rise=0.05))
    for step in range(60):
        model(*batch(step % 5))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(steering_of(plain), steering_of(perturber))


def test_gradients_that_are_not_in_grad_are_refused():
    model = mlp()
    optimizer = sgd(model)
    steppe.attach(model, optimizer, steppe.rwp(rise=STEADY))
    x, y = batch(0)
    leaves = list(model.parameters())
    grads = torch.autograd.grad(loss_fn(model(x), y), leaves)
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad
    with pytest.raises(RuntimeError, match="torch.autograd.grad hands them out"):
        optimizer.step()


def test_a_backward_to_the_inputs_alone_does_not_disturb_the_measure():
    found = []
    for attacked in (False, True):
        model = mlp()
        optimizer = sgd(model)
        perturber = steppe.attach(model, optimizer, steppe.rwp(rise=STEADY))
        for step in range(5):
            x, y = batch(step)
            if attacked:
                x = x.clone().requires_grad_()
                torch.autograd.grad(loss_fn(model(x), y), x)
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(perturber.stats()["measured_rise"])
    assert found[0] == found[1] != 0


@pytest.mark.parametrize("explicit", ["backward", "passes"])
def test_explicit_passes_give_the_same_r(explicit):
    _, plain = train(steppe.rwp(rise=0.05))
    model = mlp()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp(rise=0.05))
    for step in range(60):
        x, y = batch(step % 5)
        if explicit == "backward":
            perturber.backward(lambda: loss_fn(model(x), y))
        else:
            for run in perturber.passes():
                with run:
                    loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(steering_of(plain), steering_of(perturber))


def test_the_passes_of_a_mixed_method_give_one_r_however_they_run():
    """Over micro-batches, where half of a step is clean, and from a loss and two batches."""
    method = steppe.m_rwp(rise=STEADY, lam=0.3)
    model = mlp()
    optimizer = sgd(model)
    by_hooks = steppe.attach(model, optimizer, method)
    other = mlp()
    other_optimizer = sgd(other)
    by_hand = steppe.attach(other, other_optimizer, method)
    for step in range(40):
        batches = [batch(2 * step), batch(2 * step + 1)]
        for x, y in batches:
            (loss_fn(model(x), y) / 2).backward()
        by_hand.backward(lambda x, y: loss_fn(other(x), y), *batches)
        for each in (optimizer, other_optimizer):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(steering_of(by_hooks), steering_of(by_hand), rtol=1e-3, atol=1e-6)


def test_a_probe_measures_the_rise_directly():
    """Of a quadratic loss the meter's half is the rise itself."""
    model = nn.Linear(20, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    perturber = steppe.attach(model, optimizer, steppe.rwp(rise=steppe.constant(0.02)))
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = model(x).detach()
    for _ in range(400):
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    probe = perturber.probe(lambda: (model(x) - y).square().mean(), samples=400)
    assert probe.rise == pytest.approx(perturber.stats()["measured_rise"], rel=0.25)


def test_batchnorm_fits_the_true_weights_without_a_call():
    """Statistics come from rest steps alone: strong noise does not shift them. (With learning rate 0
    those of all steps belong to the same weights.)"""

    def statistics(model):
        return torch.cat([b for name, b in model.named_buffers() if "running" in name])

    method = steppe.rwp(rise=steppe.constant(1.0))
    model, perturber = train(method, 81, model=conv(), data=images, lr=0.0)
    assert perturber.stats()["displacement"] > 0.1
    found = statistics(model).clone()
    shifted = statistics(train(steppe.rwp(ratio=0.3), 81, model=conv(), data=images, lr=0.0)[0])
    steppe.recompute_norm_stats(model, [images(k) for k in range(5)])
    error, other = ((s - statistics(model)).norm() for s in (found, shifted))
    assert float(error) < 0.1 * float(statistics(model).norm())
    assert float(error) < 0.5 * float(other)


def test_sam_takes_the_rho_that_raises_the_loss_by_the_rise():
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model)
    x, y = batch(dtype=torch.float64)
    grads = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
    size = torch.stack([g.square().sum() for g in grads]).sum()
    true, seen = weights_of(model), []
    perturber = steppe.attach(model, optimizer, steppe.sam(rise=steppe.constant(0.01)))

    def loss_of():
        seen.append(weights_of(model))
        return loss_fn(model(x), y)

    perturber.backward(loss_of)
    eps = [a - b for a, b in zip(seen[1], true, strict=True)]
    wanted = [0.01 * g / size for g in grads]
    for a, b in zip(eps, wanted, strict=True):
        torch.testing.assert_close(a, b)


def accumulated(counts, divided_by=None, stop=None, rise=STEADY, **options):
    """SAM over as many micro-batches a step: the weights, and <eps, g> of each in units of the rise."""

    def made():
        model = mlp(dtype=torch.float64)
        optimizer = sgd(model)
        return model, optimizer, steppe.attach(model, optimizer, steppe.sam(rise=rise), **options)

    model, optimizer, perturber = made()
    slopes = []
    for step, count in enumerate(counts):
        if step == stop:
            saved = copy.deepcopy([each.state_dict() for each in (model, optimizer, perturber)])
            model, optimizer, perturber = made()
            for each, state in zip((model, optimizer, perturber), saved, strict=True):
                each.load_state_dict(state)
        slopes.append([])
        for part in range(count):
            x, y = batch(10 * step + part, dtype=torch.float64)
            seen, true = [], weights_of(model)

            def loss_of(x=x, y=y, seen=seen, count=count):
                seen.append(weights_of(model))
                return loss_fn(model(x), y) / (divided_by or count)

            perturber.backward(loss_of)
            twin = mlp(dtype=torch.float64)
            twin.load_state_dict(model.state_dict())
            grads = torch.autograd.grad(loss_fn(twin(x), y), list(twin.parameters()))
            parts = zip(seen[1], true, grads, strict=True)
            slopes[-1].append(float(sum(((a - b) * g).sum() for a, b, g in parts)) / 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), slopes


def test_sam_over_micro_batches_asks_for_the_rise_of_each():
    """A loop that divides by 4 also in an epoch's last, shorter step; from the second step on."""
    _, slopes = accumulated([4, 4, 1, 4, 4, 1], divided_by=4)
    for found in slopes[1:]:
        assert found == pytest.approx([1.0] * len(found))


def test_sam_over_a_shorter_step_divided_by_its_own_length_is_weaker_never_stronger():
    _, slopes = accumulated([4, 4, 1, 4, 4])
    assert [found[0] for found in slopes[1:]] == pytest.approx([1, 0.25, 1, 1])
    _, slopes = accumulated([1, 4, 1, 4], divided_by=1, microbatch_loss="sum")
    assert [found[0] for found in slopes] == pytest.approx([1] * 4)


@pytest.mark.parametrize("stop", [1, 3])
def test_sam_over_micro_batches_resumes_bit_exactly(stop):
    counts = [2, 2, 1, 2, 2]
    assert equal(accumulated(counts)[0], accumulated(counts, stop=stop)[0])


def test_arwp_shapes_the_noise_whatever_the_unit_of_the_loss():
    """The history is relative to its mean: a loss times 1000 leaves the factors alone."""
    spreads = []
    for unit in (1.0, 1000.0):
        method = steppe.arwp(rise=steppe.constant(0.05 * unit))
        model = mlp(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / unit)
        perturber = steppe.attach(model, optimizer, method)
        for step in range(20):
            x, y = batch(step, dtype=torch.float64)
            (unit * loss_fn(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        (noise,) = (p.perturbation for p in method.passes)
        spreads.append(noise.factor(perturber.state_dict()["states"][0]))
    torch.testing.assert_close(*spreads, rtol=1e-6, atol=1e-9)
    assert float(spreads[0].max() / spreads[0].min()) > 1.5


def test_an_optimizer_with_steps_behind_it_is_warned_of():
    model = mlp()
    optimizer = sgd(model)
    loss_fn(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    steppe.attach(model, optimizer, steppe.rwp(rise=0.05))
    with pytest.warns(UserWarning, match="taken steps before steppe was attached"):
        model(batch()[0])


class InUnits(nn.Module):
    """A regression net whose outputs are in some unit; Adam trains it alike in all of them."""

    def __init__(self, unit):
        super().__init__()
        torch.manual_seed(0)
        self.unit = unit
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)).double()

    def forward(self, x):
        return self.unit * self.net(x)


def regress(unit, rise, steps=400, reduction="mean", lr_at=lambda step: 0.01, model=None):
    """Stats after each step, what was said, and the mean squared error with targets of 1."""
    model = model or InUnits(unit)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-30)
    perturber = steppe.attach(model, optimizer, steppe.rwp(rise=rise))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    y = unit * x[:, :1] * x[:, 1:2].sign()
    stats = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr_at(step)
            i = torch.randint(64, (16,), generator=generator)
            F.mse_loss(model(x[i]), y[i], reduction=reduction).backward()
            optimizer.step()
            optimizer.zero_grad()
            stats.append(perturber.stats())
    left = float(F.mse_loss(model(x), y)) / unit**2
    perturber.detach()
    return stats, [str(w.message) for w in said], left


@pytest.mark.parametrize("unit", [1000.0, 0.001])
def test_the_rise_is_in_the_unit_of_the_loss(unit):
    """Targets times 1000: a loss, and so a rise, times a million gives the same run."""
    usual, _, left = regress(1.0, 0.05)
    scaled, _, same = regress(unit, 0.05 * unit**2)
    assert scaled[-1]["ratio"] == pytest.approx(usual[-1]["ratio"], rel=1e-6)
    assert scaled[-1]["ramp"] == pytest.approx(usual[-1]["ramp"], rel=1e-6)
    assert same == pytest.approx(left, rel=1e-6)


def test_with_targets_times_1000_a_small_rise_does_nothing():
    """r stays at the least there is, and training is what it is without steppe."""
    stats, said, left = regress(1000.0, 0.05)
    assert stats[-1]["ratio"] == pytest.approx(LEAST)
    assert not said
    assert left == pytest.approx(regress(1000.0, 0.0)[2], rel=0.1)


def test_with_targets_times_a_thousandth_the_rise_cannot_be_held():
    stats, said, _ = regress(0.001, 0.05)
    assert max(s["ratio"] for s in stats) <= 0.5
    assert stats[-1]["measured_rise"] < 1e-6
    assert all("cannot be held" in words for words in said)
    assert said


def test_a_summed_loss_wants_the_rise_times_the_batch():
    mean, _, left = regress(1.0, 0.05)
    summed, _, same = regress(1.0, 16 * 0.05, reduction="sum")
    assert summed[-1]["ratio"] == pytest.approx(mean[-1]["ratio"], rel=1e-6)
    assert same == pytest.approx(left, rel=1e-6)
    weaker, _, _ = regress(1.0, 0.05, reduction="sum")
    assert weaker[-1]["ratio"] < 0.5 * mean[-1]["ratio"]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_label_smoothing_does_not_keep_the_ramp_shut(smoothing):
    """The loss has a floor, the pull on the outputs has none."""
    model = mlp()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp(rise=0.02))
    for step in range(1500):
        x, _ = batch(step % 5)
        loss = F.cross_entropy(model(x), (x[:, 0] > 0).long(), label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = perturber.stats()
    assert stats["ramp"] > 0.4
    off = stats["measured_rise"] - stats["ramp"] * 0.02
    assert abs(off) < 4 * stats["measured_rise_stderr"] < 0.06


def test_fine_tuning_from_a_low_loss_leaves_it_off_and_says_so():
    model = InUnits(1.0)
    regress(1.0, 0.0, 800, model=model)
    low = {"lr_at": lambda step: 1e-4, "model": model}
    stats, said, _ = regress(1.0, 0.05, 610, **low)
    assert stats[-1]["ramp"] < 0.05
    assert any("still almost off" in words for words in said)
    stats, _, _ = regress(1.0, STEADY, 300, **low)
    assert stats[-1]["measured_rise"] == pytest.approx(0.05, rel=0.5)


def test_r_follows_restarts_of_the_learning_rate():
    """Cosine restarts every 300 steps: r moves by 5 % a step at most and the rise stays near."""
    stats, said, _ = regress(
        1.0, STEADY, 900, lr_at=lambda step: 0.01 * (1 + math.cos(math.pi * (step % 300) / 300)) / 2
    )
    ratios = torch.tensor([s["ratio"] for s in stats[OPENING:]])
    assert (ratios[1:] / ratios[:-1]).log().abs().max() <= 4 * 0.05 + 1e-6  # measured every 4th
    for k in (300, 600):
        late = [s["measured_rise"] for s in stats[k + 100 : k + 300]]
        assert sum(late) / len(late) == pytest.approx(0.05, rel=0.3)
    assert not said


@pytest.mark.parametrize(
    "make",
    [
        lambda: steppe.rwp(0.1, rise=0.05),
        lambda: steppe.rwp(ratio=0.1, rise=0.05),
        lambda: steppe.sam(0.1, rise=0.05),
        lambda: steppe.lpf_sgd(0.1, rise=0.05),
    ],
)
def test_not_one_strength_is_refused(make):
    with pytest.raises(ValueError, match="Give one strength"):
        make()


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_bad_rise_is_refused(value):
    with pytest.raises(ValueError, match="rise must be finite and at least 0"):
        steppe.rwp(rise=value)
