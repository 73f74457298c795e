"""Loops as people write them: mixed precision, clipping, schedules, compilation, odd parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import steppe
from tests.nets import batch, conv, equal, images, loss_fn, mlp, weights_of


def train(model, optimizer, steps=3, *, data=batch, accumulate=1, scaler=None, clip=None):
    for step in range(steps):
        for part in range(accumulate):
            x, y = data(step * accumulate + part)
            loss = loss_fn(model(x), y) / accumulate
            (scaler.scale(loss) if scaler else loss).backward()
        if clip:
            if scaler:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()


def history(perturber):
    (state,) = perturber.state_dict()["states"]
    return torch.cat([t.flatten().clone() for t in state["history"]])


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_the_steps_they_would_take_with_these_gradients(name):
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    perturber = steppe.attach(model, optimizer, steppe.arwp(0.05))
    twin = copy.deepcopy(model)
    other = OPTIMIZERS[name](twin.parameters())
    for step in range(4):
        loss_fn(model(batch(step)[0]), batch(step)[1]).backward()
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        assert equal(weights_of(twin), weights_of(model))
    assert perturber.step == 4


def test_lr_schedulers_and_clipping_see_what_they_should():
    model = mlp()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    perturber = steppe.attach(model, optimizer, steppe.arwp(0.05, beta=0.0))
    for step in range(3):
        loss_fn(model(batch(step)[0]), batch(step)[1]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert norm > 0.01
        optimizer.step()
        schedule.step()
        # the history of a one-pass method is of the clipped gradients, as the optimizer sees them
        assert history(perturber).sum().sqrt() == pytest.approx(0.01, rel=1e-4)
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_clipping_sees_the_mixed_gradient():
    model = mlp()
    optimizer = sgd(model)
    steppe.attach(model, optimizer, steppe.m_rwp(0.05, lam=0.3))
    for part in range(2):
        (loss_fn(model(batch(part)[0]), batch(part)[1]) / 2).backward()
    before = [p.grad.clone() for p in model.parameters()]
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    after = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    ratio = after[0] / before[0]
    assert torch.allclose(ratio, ratio.flatten()[0].expand_as(ratio), rtol=1e-4)
    assert equal(after, [p.grad for p in model.parameters()]), (
        "the step does not rescale them again"
    )


# ---------------------------------------------------------------------- mixed precision


def scaler(**options):
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, **options)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", [steppe.arwp(0.05, eta=5.0), steppe.msam(0.5)])
def test_a_scaler_changes_nothing_for_one_pass_methods(fused, method):
    ends = []
    for scale in (None, scaler()):
        model = mlp()
        optimizer = sgd(model, fused=fused)
        perturber = steppe.attach(model, optimizer, method)
        train(model, optimizer, 4, scaler=scale)
        (state,) = perturber.state_dict()["states"]
        ends.append(weights_of(model) + [t.clone() for v in state.values() for t in v])
    for plain, scaled in zip(*ends, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_m_arwp_has_the_same_history_with_and_without_a_scaler(fused, elementwise, clip):
    found = []
    for scale in (None, scaler()):
        model = mlp()
        optimizer = sgd(model, fused=fused)
        method = steppe.m_arwp(0.05, eta=5.0, lam=0.3, elementwise=elementwise)
        perturber = steppe.attach(model, optimizer, method, scaler=scale)
        train(model, optimizer, 4, accumulate=2, scaler=scale, clip=clip)
        found.append(history(perturber))
    assert found[0].max() > 0
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("fused", [False, True])
def test_m_arwp_refuses_a_scaler_that_it_was_not_told_of(fused):
    model = mlp()
    optimizer = sgd(model, fused=fused)
    steppe.attach(model, optimizer, steppe.m_arwp(0.05))
    with pytest.raises(RuntimeError, match=r"attach\(..., scaler=scaler\)"):
        train(model, optimizer, 1, accumulate=2, scaler=scaler())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", [steppe.arwp(0.05), steppe.m_arwp(0.05), steppe.msam(0.5)])
def test_an_overflow_skips_the_step_and_leaves_history_and_weights(fused, method):
    model = mlp()
    optimizer = sgd(model, fused=fused)
    scale = scaler()
    perturber = steppe.attach(model, optimizer, method, scaler=scale)
    parts = method.batches_needed
    train(model, optimizer, 2, accumulate=parts, scaler=scale)
    (state,) = perturber.state_dict()["states"]
    before = weights_of(model) + [t.clone() for v in state.values() for t in v]

    def overflowing(step):
        x, y = batch(step)
        return x * float("inf"), y

    train(model, optimizer, 1, accumulate=parts, scaler=scale, data=overflowing)
    after = weights_of(model) + [t for v in state.values() for t in v]
    assert equal(before, after)
    assert perturber.step == (3 if fused else 2), "a fused optimizer counts a skipped step"
    train(model, optimizer, 2, accumulate=parts, scaler=scale)
    assert all(t.isfinite().all() for t in weights_of(model))
    assert perturber.step == (5 if fused else 4)


def test_a_non_finite_gradient_without_a_scaler_does_not_poison_the_history():
    model = mlp()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.arwp(0.05))
    train(model, optimizer, 2)
    before = history(perturber)
    loss_fn(model(batch()[0] * float("nan")), batch()[1]).backward()
    with torch.no_grad():
        weights = weights_of(model)
    optimizer.step()
    assert torch.equal(before, history(perturber))
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)
    optimizer.zero_grad()


def test_backward_scales_the_loss_by_the_scaler_it_was_told_of():
    ends = []
    for scale in (None, scaler()):
        model = mlp()
        optimizer = sgd(model)
        perturber = steppe.attach(model, optimizer, steppe.sam(0.1), scaler=scale)
        for step in range(3):
            x, y = batch(step)
            loss = perturber.backward(lambda: loss_fn(model(x), y))
            if scale:
                scale.step(optimizer)
                scale.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        ends.append([*weights_of(model), loss])
    for plain, scaled in zip(*ends, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-4, atol=1e-6)


def test_autocast_sees_perturbed_weights_and_then_true_ones():
    """The autocast cache would otherwise serve the weights of the pass before."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    perturber = steppe.attach(model, optimizer, steppe.m_rwp(0.5, lam=0.5))
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            true = model(x)
        clean = model(x)
        loss_fn(clean, y).backward()
        perturbed = model(x)
        loss_fn(perturbed, y).backward()
        with torch.no_grad():
            again = model(x)
    assert torch.equal(true, clean)
    assert torch.equal(true, again)
    assert not torch.equal(true, perturbed)
    optimizer.step()
    assert perturber.step == 1


# ---------------------------------------------------------------------- compile and checkpoint


@pytest.mark.parametrize("where", ["compiled object", "inner model"])
def test_torch_compile(where):
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = mlp()
        optimizer = sgd(model)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        target = called if where == "compiled object" else model
        perturber = steppe.attach(target, optimizer, steppe.m_arwp(0.05, eta=5.0, lam=0.3))
        train(called, optimizer, 3, accumulate=2)
        assert perturber.step == 3
        ends.append(weights_of(model))
    for plain, other in zip(*ends, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-5, atol=1e-6)


def test_torch_compile_keeps_batchnorm_of_perturbed_passes_frozen():
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = conv()
        optimizer = sgd(model)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        steppe.attach(called, optimizer, steppe.m_rwp(0.05, lam=0.3))
        train(called, optimizer, 2, accumulate=2, data=images)
        ends.append([t.clone() for t in model.state_dict().values()])
    for plain, other in zip(*ends, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_torch_compile_with_its_default_backend():
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = mlp()
        optimizer = sgd(model)
        called = torch.compile(model) if compiled else model
        steppe.attach(called, optimizer, steppe.arwp(0.05, eta=5.0))
        train(called, optimizer, 3)
        ends.append(weights_of(model))
    for plain, other in zip(*ends, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-4, atol=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def block(self, x):
        return torch.tanh(self.norm(self.second(x)))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.reentrant is not None:
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        else:
            x = self.block(x)
        return self.head(x)


@pytest.mark.parametrize("method", [steppe.arwp(0.05, eta=5.0), steppe.m_arwp(0.05, eta=5.0)])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(method, reentrant):
    ends = []
    for mode in (None, reentrant):
        model = Checkpointed(mode)
        optimizer = sgd(model)
        steppe.attach(model, optimizer, method)
        train(model, optimizer, 4, accumulate=method.batches_needed)
        ends.append(weights_of(model))
    for plain, other in zip(*ends, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-5, atol=1e-7)


def test_the_whole_model_inside_a_checkpoint():
    ends = []
    for wrapped in (False, True):
        model = mlp()
        optimizer = sgd(model)
        steppe.attach(model, optimizer, steppe.rwp(0.05))
        for step in range(3):
            x, y = batch(step)
            output = checkpoint(model, x, use_reentrant=False) if wrapped else model(x)
            loss_fn(output, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights_of(model))
    assert equal(*ends)


def test_a_reentrant_checkpoint_around_the_whole_model_is_refused():
    """Its first forward has no gradients, so runs at true weights; only the second is perturbed."""
    model = mlp()
    steppe.attach(model, sgd(model), steppe.rwp(0.05))
    true = weights_of(model)
    x, y = batch()
    output = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss_fn(output, y).backward()
    assert equal(true, weights_of(model))


# ---------------------------------------------------------------------- layouts and parameters


def test_channels_last_trains_with_its_layout_kept():
    model = conv().to(memory_format=torch.channels_last)
    optimizer = sgd(model)
    steppe.attach(model, optimizer, steppe.arwp(0.05))
    train(model, optimizer, 3, data=images)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_model_that_changes_its_layout_after_attach_is_still_perturbed_and_put_back():
    model = conv()
    optimizer = sgd(model)
    steppe.attach(model, optimizer, steppe.rwp(0.05))
    train(model, optimizer, 1, data=images)
    model.to(memory_format=torch.channels_last)
    true = weights_of(model)
    loss = loss_fn(model(images()[0]), images()[1])
    assert not torch.equal(true[0], model[0].weight)
    loss.backward()
    assert equal(true, weights_of(model))


@pytest.mark.parametrize(
    "method", [steppe.rwp(0.5), steppe.m_arwp(0.5), steppe.msam(0.5), steppe.sam(0.5)]
)
def test_bf16_parameters(method):
    model = mlp(dtype=torch.bfloat16)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    true = weights_of(model)
    for step in range(2):
        parts = [batch(10 * step + k, dtype=torch.bfloat16) for k in range(method.batches_needed)]
        perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
        if step == 0:
            assert equal(true, weights_of(model))
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())


class Odd(nn.Module):
    """Tied, frozen, unused, scalar and empty parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6, bias=False)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.scale * torch.tanh(self.frozen(self.b(torch.tanh(self.a(x))))))


@pytest.mark.parametrize(
    "method",
    [
        steppe.rwp(0.05),
        steppe.arwp(0.05),
        steppe.m_arwp(0.05),
        steppe.sam(0.1),
        steppe.asam(),
        steppe.msam(0.5),
        steppe.arwp(0.05, elementwise=True),
    ],
    ids=lambda m: repr(m.passes[-1].perturbation),
)
def test_odd_parameters(method):
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, method)
    names = [slot.name for slot in perturber._engine.weights.params]
    assert names.count("a.weight") + names.count("b.weight") == 1
    assert "empty" not in names
    assert "scale" in names
    still = [t.clone() for m in (model.frozen, model.unused) for t in m.state_dict().values()]
    tied = model.a.weight
    for step in range(3):
        parts = [batch(10 * step + k) for k in range(method.batches_needed)]
        perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
        optimizer.step()
        optimizer.zero_grad()
    after = [t for m in (model.frozen, model.unused) for t in m.state_dict().values()]
    assert equal(still, after), "frozen and unused parameters are bit for bit where they were"
    assert model.a.weight is tied
    assert model.b.weight is tied


def test_unused_parameters_are_perturbed_and_frozen_ones_are_not():
    model = Odd()
    steppe.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steppe.rwp(0.05))
    true = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(batch()[0])
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, true[name])}
    assert moved == {
        "a.weight",
        "unused.weight",
        "unused.bias",
        "scale",
        "head.weight",
        "head.bias",
    }


def test_a_layer_that_thaws_later_is_perturbed_from_then_on():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.m_arwp(0.05, lam=0.3))
    train(model, optimizer, 2, accumulate=2)
    frozen = model[0].weight.detach().clone()
    assert torch.equal(history(perturber)[:9], torch.zeros(9))
    model[0].requires_grad_(True)
    train(model, optimizer, 2, accumulate=2)
    assert not torch.equal(frozen, model[0].weight)
    assert (history(perturber)[:9] > 0).all()


def test_parameter_groups_have_their_own_options():
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "strength": 0.5},
        {"params": model[2].parameters(), "perturb": False},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.05))
    plain = mlp()
    groups = [
        {"params": plain[0].parameters()},
        {"params": plain[2].parameters(), "perturb": False},
    ]
    steppe.attach(plain, torch.optim.SGD(groups, lr=0.1), steppe.rwp(0.05))
    true = weights_of(model)
    model(batch()[0])
    plain(batch()[0])
    eps = [a - b for a, b in zip(weights_of(model), true, strict=True)]
    full = [a - b for a, b in zip(weights_of(plain), true, strict=True)]
    torch.testing.assert_close(eps[0], full[0] / 2, rtol=1e-4, atol=1e-7)
    assert float(eps[2].abs().max()) == 0
    assert "2.weight: perturb=False in its group" in repr(perturber)


def test_strength_of_a_group_scales_sam_too():
    eps = []
    for strength in (1.0, 0.5):
        model = mlp()
        optimizer = torch.optim.SGD(
            [{"params": list(model.parameters()), "strength": strength}], lr=0.1
        )
        perturber = steppe.attach(model, optimizer, steppe.sam(0.1))
        true = weights_of(model)
        for run in perturber.passes():
            with run:
                loss_fn(model(batch()[0]), batch()[1]).backward()
                moved = weights_of(model)
        eps.append(torch.cat([(a - b).flatten() for a, b in zip(moved, true, strict=True)]))
    assert eps[0].norm() == pytest.approx(0.1, rel=1e-4)
    torch.testing.assert_close(eps[1], eps[0] / 2, rtol=1e-3, atol=1e-7)


def test_exclude_by_name():
    model = conv()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.05), exclude=("*.bias", "1.*"))
    names = [slot.name for slot in perturber._engine.weights.params]
    assert names == ["0.weight", "3.weight", "4.weight", "6.weight"]
    assert "left out   1.weight: excluded by '1.*'" in repr(perturber)
    perturber.detach()
    with pytest.warns(UserWarning, match=r"exclude='\*nothing\*' matches no parameter"):
        steppe.attach(model, optimizer, steppe.rwp(0.05), exclude="*nothing*")


def test_excluded_parameters_are_weighed_all_the_same():
    grads = []
    for exclude in ((), ("2.*",)):
        model = mlp()
        perturber = steppe.attach(model, sgd(model), steppe.m_rwp(1e-12, lam=0.3), exclude=exclude)
        perturber.backward(lambda x, y: loss_fn(model(x), y), batch(0), batch(1))
        grads.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_a_model_whose_forward_is_called_several_times_before_one_backward():
    model = mlp()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.m_rwp(0.05))
    true = weights_of(model)
    for part in range(2):
        first, second = model(batch(part)[0]), model(batch(part)[0] + 1)
        (loss_fn(first, batch(part)[1]) + loss_fn(second, batch(part)[1])).div(4).backward()
    assert perturber.stats()["passes_since_step"] == 2
    assert equal(true, weights_of(model))
    optimizer.step()


def test_sparse_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.arwp(0.05, eta=5.0))
    for step in range(3):
        torch.manual_seed(step)
        loss_fn(model(torch.randint(0, 20, (8, 2))), torch.randint(0, 3, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert history(perturber).isfinite().all()
    assert history(perturber)[:20].max() > 0


def test_a_run_on_two_threads_of_drawing_keeps_the_promise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steppe.attach(model, optimizer, steppe.rwp(0.01))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        true = weights_of(model)
        train(model, optimizer, 5)
        assert equal(true, weights_of(model))
    finally:
        torch.set_num_threads(before)
