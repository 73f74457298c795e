"""Several models in one process, and steps that are thrown away: nobody's gradient may be another's."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steppe
from tests.nets import equal, loss_fn, mlp, weights_of
from tests.review.loops import Weighted, assert_close, attached, data, grads_of, leaves_of, net, sgd

TINY = 1e-9
"""A strength at which gradients are those of the true weights, to rounding."""


def other():
    return mlp(seed=1, dtype=torch.float64)


def loss_of(model, step):
    x, y = data(step)
    return loss_fn(model(x), y)


def mixed_by_hand(model, lam=0.3):
    """(1 - lam) of the first micro-batch's gradient, which is the perturbed one, and lam of the second's."""
    grads = [torch.autograd.grad(loss_of(model, k), leaves_of(model)) for k in range(2)]
    return [(1 - lam) * first + lam * second for first, second in zip(*grads, strict=True)]


def test_two_attached_models_weigh_their_own_gradients_alone():
    a, b = net(), other()
    expected = [mixed_by_hand(copy.deepcopy(model)) for model in (a, b)]
    for seed, model in enumerate((a, b)):
        steppe.attach(model, sgd(model), steppe.m_rwp(TINY, lam=0.3), seed=seed)
    for k in range(2):
        losses = [loss_of(model, k) / 2 for model in (a, b)]
        for loss in losses:
            loss.backward()
    for model, wanted in zip((a, b), expected, strict=True):
        assert_close(grads_of(model), wanted, rtol=1e-5)


def test_one_loss_of_two_attached_models_in_explicit_passes():
    a, b = net(), other()
    expected = [mixed_by_hand(copy.deepcopy(model), 0.5) for model in (a, b)]
    first, second = (
        steppe.attach(model, sgd(model), steppe.m_rwp(TINY), seed=seed)
        for seed, model in enumerate((a, b))
    )
    for k, (run, their_run) in enumerate(zip(first.passes(), second.passes(), strict=True)):
        with run, their_run:
            (loss_of(a, k) + loss_of(b, k)).backward()
    for model, wanted in zip((a, b), expected, strict=True):
        assert_close(grads_of(model), wanted, rtol=1e-5)


def test_a_backward_of_another_model_inside_a_pass_is_refused_where_it_would_be_weighed():
    a, b = net(), other()
    optimizer, theirs = sgd(a), sgd(b)
    steppe.attach(a, optimizer, steppe.m_rwp(TINY, lam=0.3))
    loss = loss_of(a, 0) / 2
    with pytest.raises(RuntimeError, match="before the attached model's forward"):
        loss_of(b, 0).backward()
    optimizer.zero_grad()
    theirs.zero_grad()
    del loss
    for k in range(2):  # in the order that the error asks for
        loss_of(b, k).backward()
        (loss_of(a, k) / 2).backward()
    assert_close(grads_of(a), mixed_by_hand(net()), rtol=1e-5)


def test_an_incomplete_step_leaves_the_gradients_of_other_models_alone():
    a, b = net(), other()
    optimizer, theirs = sgd(a), sgd(b)
    steppe.attach(a, optimizer, steppe.m_rwp(TINY, lam=0.3))
    for k in range(5):
        (loss_of(a, k) / 2).backward()
        loss_of(b, k).backward()
        if k in (1, 3, 4):
            before = grads_of(b)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            assert equal(grads_of(b), before)
            for done in (theirs, optimizer):
                done.zero_grad()


def test_old_gradients_of_another_model_do_not_hide_that_a_batch_was_thrown_away():
    old = mlp(seed=3, dtype=torch.float64)
    theirs = sgd(old)
    loss_of(old, 0).backward()
    theirs.step()  # and its gradients stay
    a, optimizer, _ = attached(steppe.m_rwp(TINY, lam=0.3), lr=0.0)
    expected = mixed_by_hand(copy.deepcopy(a))
    for k in range(2):
        (loss_of(a, k) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    (loss_of(a, 9) / 2).backward()
    optimizer.zero_grad()
    for k in range(2):
        (loss_of(a, k) / 2).backward()
    optimizer.step()
    assert_close(grads_of(a), expected, rtol=1e-5)


def test_a_closure_leaves_the_gradients_of_other_models_alone():
    a, b = net(), other()
    optimizer = sgd(a)
    theirs = sgd(b)
    perturber = steppe.attach(a, optimizer, steppe.m_rwp(TINY, lam=0.3, same_batch=True))
    loss_of(b, 0).backward()
    before = grads_of(b)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(a, 0)
        loss.backward()
        return loss

    for step in range(2):
        optimizer.step(closure)
        assert perturber.step == step + 1
        assert equal(grads_of(b), before)
    theirs.step()


@pytest.mark.parametrize("skipped", [3, 8])
def test_steps_that_are_thrown_away_leave_no_trace_in_a_rise(skipped):
    def states(thrown_away):
        model, optimizer, perturber = attached(steppe.rwp(rise=0.05))
        for step in range(30):
            for _ in range(thrown_away if step in (0, 11) else 0):
                loss_of(model, step).backward()
                optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return perturber.state_dict()["states"][0]["steering"][0], weights_of(model)

    (state, weights), (theirs, expected) = states(skipped), states(0)
    assert equal([state, *weights], [theirs, *expected])


def test_zero_grad_between_forward_and_backward_keeps_the_order_of_passes():
    """An odd number of batches an epoch: the last gradient is thrown away in the next epoch's first step."""
    model, optimizer, _ = attached(steppe.m_rwp(ratio=0.5, lam=0.3), lr=0.0)
    true, ran = weights_of(model), []
    for epoch in range(3):
        for i in range(3):
            loss = loss_of(model, 3 * epoch + i) / 2
            ran.append("clean" if equal(weights_of(model), true) else "perturbed")
            if i % 2 == 0:
                optimizer.zero_grad()
            loss.backward()
            if i % 2 == 1:
                optimizer.step()
                assert set(ran[-2:]) == {"clean", "perturbed"}, (epoch, ran)


VIEWS = {
    "squeeze": lambda z: z.squeeze(-1),
    "view": lambda z: z.view(-1),
    "last": lambda z: z[:, -1],
    "transpose": lambda z: z.t(),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("strength", [{"ratio": 0.3}, {"rise": 0.05}])
def test_an_output_that_is_changed_in_place_still_ends_its_pass(view, strength):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(6, 1)

        def forward(self, x):
            return VIEWS[view](self.last(x))

    model = Model().double()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp(**strength))
    true = weights_of(model)
    z = model(data()[0])
    z /= 2.0
    F.mse_loss(z, torch.zeros_like(z)).backward()
    assert not perturber.perturbed
    assert equal(weights_of(model), true)
    optimizer.step()
    assert perturber.step == 1


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(20, 6), mlp()

    def forward(self, ids=None, embeds=None):
        return self.body((self.embed(ids) if embeds is None else embeds).mean(1))


def test_inputs_computed_with_a_part_of_the_model_are_refused_and_work_in_a_held_pass():
    model = Embeds()
    optimizer = sgd(model, lr=0.0)
    perturber = steppe.attach(model, optimizer, steppe.rwp(ratio=0.8))
    ids, target = torch.arange(32).view(8, 4) % 20, torch.arange(8) % 3
    loss_fn(model(ids), target).backward()
    expected = grads_of(model)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"embed\.weight.*perturber\.passes"):
        model(embeds=model.embed(ids))
    for run in perturber.passes():
        with run:
            loss_fn(model(embeds=model.embed(ids)), target).backward()
    assert_close(grads_of(model), expected)


@pytest.mark.parametrize("inner", ["compiled", "part"])
def test_a_part_that_is_evaluated_after_a_loss_was_thrown_away_has_true_weights(inner):
    raw = mlp()
    outer = torch.compile(raw, backend="eager") if inner == "compiled" else nn.Sequential(raw)
    x, y = (t.float() if t.is_floating_point() else t for t in data())
    true = raw(x).detach()
    steppe.attach(outer, sgd(raw), steppe.rwp(ratio=0.5))
    loss_fn(outer(x), y)  # not finite, say
    raw.eval()
    with torch.no_grad():
        assert torch.equal(raw(x), true)


PENALIZED = pytest.mark.parametrize(
    "method",
    [steppe.rwp(0.3), steppe.m_rwp(0.3, lam=0.3), steppe.antithetic_rwp(0.3)],
    ids=lambda method: method.name,
)


def penalized(model, step=0):
    """A forward of the model, and a penalty on its weights that is differentiated before the loss."""
    output = model(data(step)[0])
    (1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
    return output


@PENALIZED
def test_an_evaluation_after_the_backward_of_a_penalty_has_true_weights(method):
    model, _, _ = attached(method)
    with torch.no_grad():
        true = model.eval()(data(5)[0])
    for _ in range(len(method.passes) - 1):
        loss_fn(penalized(model.train()), data()[1]).backward()
    penalized(model.train())
    with torch.no_grad():
        assert torch.equal(model.eval()(data(5)[0]), true)
    penalized(model.train())
    model[0].eval()
    assert torch.equal(model[2](model[1](model[0](data(5)[0]))), true)
    penalized(model.train())
    with pytest.raises(TypeError):
        model(None)
    assert torch.equal(model[2](model[1](model[0](data(5)[0]))), true)


@PENALIZED
def test_a_penalty_that_is_differentiated_first_belongs_to_its_pass(method):
    model, optimizer, perturber = attached(method, lr=0.0)
    for _ in range(len(method.passes) - 1):
        loss_fn(penalized(model), data()[1]).backward()
    penalized(model, 1)
    optimizer.zero_grad()  # a batch that is skipped
    twin, wanted = net(), [torch.zeros_like(p) for p in model.parameters()]
    factors = {0: 1 - 0.3, 1: 0.3} if method.name == "m_rwp" else {0: 0.5, 1: 0.5}
    for _ in method.passes:
        output = penalized(model)
        run = perturber._training.step.running
        with torch.no_grad():
            for p, moved in zip(twin.parameters(), weights_of(model), strict=True):
                p.copy_(moved)
        loss_fn(output, data()[1]).backward()
        loss = loss_fn(twin(data()[0]), data()[1])
        loss = loss + 1e-3 * sum(p.square().sum() for p in twin.parameters())
        factor = factors[run.index] * 2 if len(method.passes) > 1 else 1.0
        for w, g in zip(wanted, torch.autograd.grad(loss, list(twin.parameters())), strict=True):
            w.add_(g, alpha=factor)
    assert_close(grads_of(model), wanted)
    optimizer.step()
    assert perturber.stats()["incomplete_steps"] == 0


def test_a_copy_of_optimizer_and_model_after_a_thrown_away_loss_has_true_weights():
    model, optimizer, _ = attached(steppe.rwp(ratio=0.5))
    true = weights_of(model)
    loss_of(model, 0)
    copied, theirs = copy.deepcopy((optimizer, model))
    assert equal(weights_of(theirs), true)
    assert next(p for g in copied.param_groups for p in g["params"]) is next(theirs.parameters())
    assert "__getstate__" not in vars(copied)


class WithLoss(nn.Module):
    """Returns its loss, and beside it what the loss does not depend on."""

    def __init__(self, beside):
        super().__init__()
        self.net, self.beside = net(), beside

    def forward(self, x, y):
        logits = self.net(x)
        return {"loss": loss_fn(logits, y), self.beside: logits.softmax(-1)}


@pytest.mark.parametrize("beside", ["probs", "logits"])
def test_a_rise_follows_the_loss_where_no_other_output_is_differentiated(beside):
    model = WithLoss(beside)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp())
    for step in range(3):
        loss = model(*data(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first = perturber.state_dict()["states"][0]["steering"][0][7]
    assert 0.5 < float(first) < 2


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_batch_of_one_sample_is_not_taken_for_a_loss(squeezed):
    def first(tail):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 1), *[nn.Flatten(0)] * squeezed).double()
        net[0].bias.data.fill_(200.0)
        optimizer = sgd(net, lr=1e-3)
        perturber = steppe.attach(net, optimizer, steppe.rwp())
        for step in range(5):
            x = data(step)[0][: tail if step == 4 else 12]
            out = net(x)
            F.mse_loss(out, 203 + x.sum(1).view_as(out)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(perturber.state_dict()["states"][0]["steering"][0][7])

    assert first(1) == pytest.approx(first(12), rel=0.5)


def test_a_model_that_returns_its_input_may_be_called_again_on_it():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(6, 1).double()

        def forward(self, x):
            return self.last(x), [x]

    model, generator = Features(), nn.Linear(6, 6).double()
    optimizer, theirs = sgd(model), sgd(generator)
    perturber = steppe.attach(model, optimizer, steppe.rwp(ratio=0.1))
    fake = generator(data()[0])
    model(fake)[0].mean().backward(retain_graph=True)
    optimizer.step()
    (-model(fake)[0].mean()).backward()
    theirs.step()
    assert perturber.step == 1
    assert not perturber.perturbed


@pytest.mark.parametrize("transform", ["vmap", "jacrev"])
def test_a_transformed_model_is_refused_with_the_way_out(transform):
    model, _, perturber = attached(steppe.rwp(ratio=0.1))
    with pytest.raises(RuntimeError, match=r"torch\.func.*perturber\.passes"):
        getattr(torch.func, transform)(model)(data()[0])
    assert not perturber.perturbed


def test_tracing_in_training_mode_is_no_pass():
    model, optimizer, perturber = attached(steppe.rwp(ratio=0.1))
    traced = torch.jit.trace(model, data()[0])
    assert not perturber.perturbed
    assert torch.equal(traced(data(1)[0]), model.eval()(data(1)[0]))


def test_an_optimizer_without_torchs_hooks_is_refused():
    class Both(torch.optim.Optimizer):
        def __init__(self, *optimizers):
            self.optimizers = optimizers
            self.param_groups = [g for o in optimizers for g in o.param_groups]

    model = net()
    with pytest.raises(TypeError, match=r"Both .*super\(\).__init__"):
        steppe.attach(model, Both(sgd(model[0]), sgd(model[2])), steppe.rwp())


def test_one_optimizer_of_two_models_serves_one_method_of_several_passes():
    a, b = net(), other()
    optimizer = sgd([*a.parameters(), *b.parameters()])
    steppe.attach(a, optimizer, steppe.rwp(ratio=0.1))
    with pytest.raises(RuntimeError, match="an optimizer of its own"):
        steppe.attach(b, optimizer, steppe.m_rwp(ratio=0.1))
    steppe.attach(b, optimizer, steppe.rwp(ratio=0.1))


def test_one_optimizer_of_two_models_under_a_scaler():
    models, twins = (net(), other()), (net(), other())
    optimizer = sgd([p for model in models for p in model.parameters()])
    plain = sgd([p for model in twins for p in model.parameters()])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    first, second = (steppe.attach(m, optimizer, steppe.rwp(0.0), scaler=scaler) for m in models)
    for step in range(3):
        if step == 2:
            first.detach()
        for model in models:
            scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for model in twins:
            loss_of(model, step).backward()
        plain.step()
        plain.zero_grad()
    assert (first.step, second.step) == (2, 3)
    for model, twin in zip(models, twins, strict=True):
        assert equal(weights_of(model), weights_of(twin))
    second.detach()
    assert not [name for name in vars(optimizer) if "amp" in name or name == "__getstate__"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("left", [0, 1])
def test_a_scaler_is_noticed_after_the_other_model_was_detached(left, fused):
    models = (net(), other())
    optimizer = sgd([p for model in models for p in model.parameters()], fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    perturbers = [steppe.attach(model, optimizer, steppe.rwp(0.1)) for model in models]
    perturbers[1 - left].detach()
    scaler.scale(torch.ones(()))
    perturbers[left].backward(lambda: loss_of(models[left], 0))
    with pytest.raises(RuntimeError, match="A GradScaler steps the optimizer"):
        scaler.step(optimizer)
    perturbers[left].detach()
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused


def test_a_copy_of_an_optimizer_of_two_models_has_true_weights():
    models = (net(), other())
    optimizer = sgd([p for model in models for p in model.parameters()])
    for model in models:
        steppe.attach(model, optimizer, steppe.rwp(0.5))
    true = [w for model in models for w in weights_of(model)]
    for model in models:
        loss_of(model, 0)  # thrown away
    copied = copy.deepcopy(optimizer)
    assert equal(copied.param_groups[0]["params"], true)


@pytest.mark.parametrize("fused", [False, True])
def test_what_another_optimizer_trains_is_weighed_also_if_that_is_fused(fused):
    model, criterion = net(), Weighted()
    optimizer, theirs = sgd(model), sgd(criterion, fused=fused)
    grads = []
    for k in range(2):
        x, y = data(k)
        grads += torch.autograd.grad(criterion(model(x), y), criterion.log_weights)
    steppe.attach(model, optimizer, steppe.m_rwp(TINY, lam=0.3))
    for k in range(2):
        x, y = data(k)
        (criterion(model(x), y) / 2).backward()
    optimizer.step()
    assert_close([criterion.log_weights.grad], [0.7 * grads[0] + 0.3 * grads[1]], rtol=1e-5)
    theirs.step()
