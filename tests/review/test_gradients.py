"""Every leaf that the loss reaches gets the method's weighted sum of gradients, or an error."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import steppe
from tests.nets import conv, equal, images, loss_fn, weights_of
from tests.review.loops import (
    Watched,
    Weighted,
    assert_close,
    attached,
    data,
    grads_of,
    leaves_of,
    net,
    sgd,
    step_with,
)

SEVERAL = {
    "m_rwp": steppe.m_rwp(0.05, lam=0.5),
    "m_rwp lam": steppe.m_rwp(0.05, lam=0.3),
    "sam": steppe.sam(0.1),
    "sam different batches": steppe.sam(0.1, same_batch=False),
    "asam": steppe.asam(0.5),
    "lpf_sgd": steppe.lpf_sgd(0.05, samples=4),
    "antithetic_rwp": steppe.antithetic_rwp(0.05),
    "mixed msam": steppe.mixed(steppe.msam(0.5), 0.4),
}
ALL = [
    pytest.param(method, id=name) for name, method in {"rwp": steppe.rwp(0.05), **SEVERAL}.items()
]


def two_optimizers(method, **options):
    """The attached optimizer has the first layer, another one the second, a third the loss's."""
    model, loss = net(), Weighted()
    optimizer = sgd(model[0])
    others = [sgd(model[2]), sgd(loss)]
    return model, loss, [optimizer, *others], steppe.attach(model, optimizer, method, **options)


def factors_of(method):
    return [planned.weight for planned in method.passes]


@pytest.mark.parametrize("method", ALL)
def test_backward_gives_every_leaf_the_weighted_sum(method):
    model, loss, _, perturber = two_optimizers(method)
    watched = Watched(model, loss)
    perturber.backward(watched, *[data(k) for k in range(method.batches_needed)])
    assert_close(grads_of(model, loss), watched.gradients(factors_of(method)))


@pytest.mark.parametrize("method", ALL)
def test_backward_adds_to_gradients_that_are_there_already(method):
    model, loss, _, perturber = two_optimizers(method)
    for leaf in leaves_of(model, loss):
        leaf.grad = torch.ones_like(leaf)
    watched = Watched(model, loss)
    perturber.backward(watched, *[data(k) for k in range(method.batches_needed)])
    wanted = [1 + g for g in watched.gradients(factors_of(method))]
    assert_close(grads_of(model, loss), wanted)


@pytest.mark.parametrize("method", ALL)
def test_explicit_passes_give_every_leaf_of_the_model_the_weighted_sum(method):
    model, _, _, perturber = two_optimizers(method)
    watched = Watched(model, loss_fn)
    for number, run in enumerate(perturber.passes()):
        with run:
            watched(*data(number % method.batches_needed)).backward()
    assert_close(grads_of(model), watched.gradients(factors_of(method)))


@pytest.mark.parametrize("lam", [0.5, 0.3])
def test_micro_batches_give_every_leaf_of_the_model_the_weighted_sum(lam):
    model, _, _, _ = two_optimizers(steppe.m_rwp(0.05, lam=lam))
    watched = Watched(model, lambda output, y: loss_fn(output, y) / 2)
    for part in range(2):
        output = model(data(part)[0])
        watched.seen.append((weights_of(model), *data(part)))
        (loss_fn(output, data(part)[1]) / 2).backward()
    assert_close(grads_of(model), watched.gradients([2 * (1 - lam), 2 * lam]))


def test_micro_batches_of_equal_weight_serve_the_weights_of_a_loss_too():
    model, loss, _, _ = two_optimizers(steppe.m_rwp(0.0, lam=0.5))
    for part in range(2):
        (loss(model(data(part)[0]), data(part)[1]) / 2).backward()
    plain, other = net(), Weighted()
    for part in range(2):
        (other(plain(data(part)[0]), data(part)[1]) / 2).backward()
    assert_close(grads_of(model, loss), grads_of(plain, other))


def test_micro_batches_weigh_the_parameters_of_another_optimizer():
    lam = 0.3
    model, loss, _optimizers, _ = two_optimizers(steppe.m_rwp(0.05, lam=lam))
    watched = Watched(model, loss)
    for part in range(2):
        output = model(data(part)[0])
        watched.seen.append((weights_of(model), *data(part)))
        (loss(output, data(part)[1]) / 2).backward()
    assert_close(grads_of(model, loss), watched.gradients([1 - lam, lam]))


@pytest.mark.parametrize(
    "method",
    [steppe.m_rwp(0.05), steppe.antithetic_rwp(0.05), steppe.sam(0.1)],
    ids=lambda method: method.name,
)
def test_explicit_passes_weigh_the_parameters_of_another_optimizer(method):
    model, loss, _optimizers, perturber = two_optimizers(method)
    watched = Watched(model, loss)
    for run in perturber.passes():
        with run:
            watched(*data()).backward()
    assert_close(grads_of(model, loss), watched.gradients([p.weight for p in method.passes]))


def test_a_closure_serves_every_leaf_of_the_model():
    method = steppe.antithetic_rwp(0.05)
    model, _, (optimizer, *_), _ = two_optimizers(method)
    watched = Watched(model, loss_fn)

    def closure():
        model.zero_grad()
        loss = watched(*data())
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_close(grads_of(model), watched.gradients(factors_of(method)))


# ---------------------------------------------------------------------- parameters of a loss


def with_loss(method, **group):
    """One optimizer over the model and its loss, as in metric learning."""
    model, loss = net(), Weighted()
    groups = [{"params": model.parameters()}, {"params": loss.parameters(), **group}]
    optimizer = sgd(groups)
    return model, loss, optimizer, steppe.attach(model, optimizer, method)


FOREIGN = "attach refuses an optimizer that has parameters of a loss"


@pytest.mark.parametrize("group", [{}, {"perturb": False}], ids=["plain", "perturb=False"])
def test_parameters_of_a_loss_are_left_out_and_listed(group):
    model, loss, optimizer, perturber = with_loss(steppe.rwp(0.05), **group)
    assert "not the model's" in repr(perturber)
    assert "(3,)" in repr(perturber), "a parameter without a name goes by its shape"
    true, mine = weights_of(model), weights_of(loss)
    output = model(data()[0])
    assert not equal(true, weights_of(model))
    assert equal(mine, weights_of(loss))
    loss(output, data()[1]).backward()
    optimizer.step()
    assert not equal(mine, weights_of(loss)), "they are trained all the same"


@pytest.mark.parametrize("method", [steppe.m_rwp(0.05, lam=0.3), steppe.sam(0.1)], ids=["m", "sam"])
def test_parameters_of_a_loss_get_the_weighted_sum(method):
    model, loss, _, perturber = with_loss(method)
    watched = Watched(model, loss)
    perturber.backward(watched, *[data(k) for k in range(method.batches_needed)])
    assert_close(grads_of(model, loss), watched.gradients(factors_of(method)))


def test_micro_batches_weigh_parameters_of_a_loss_in_the_attached_optimizer():
    lam = 0.3
    model, loss, _, _ = with_loss(steppe.m_rwp(0.05, lam=lam))
    watched = Watched(model, loss)
    for part in range(2):
        output = model(data(part)[0])
        watched.seen.append((weights_of(model), *data(part)))
        (loss(output, data(part)[1]) / 2).backward()
    assert_close(grads_of(model, loss), watched.gradients([1 - lam, lam]))


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="not the model's"):
        steppe.attach(net(), sgd(net()), steppe.rwp(0.05))


# ---------------------------------------------------------------------- directions


@pytest.mark.parametrize(
    "method",
    [
        steppe.rwp(0.05),
        steppe.m_arwp(0.05, eta=5.0),
        *(steppe.sam(0.1), steppe.asam(0.5), steppe.msam(0.5)),
    ],
    ids=lambda method: method.name,
)
def test_maximizing_a_loss_is_minimizing_its_negative(method):
    ends = []
    for sign in (1, -1):
        model = net()
        optimizer = sgd(model, momentum=0.9, maximize=sign < 0)
        perturber = steppe.attach(model, optimizer, method)
        for step in range(4):
            parts = [data(10 * step + k) for k in range(method.batches_needed)]
            # bounded, so that going uphill stays finite
            perturber.backward(lambda x, y: sign * torch.sigmoid(loss_fn(model(x), y)), *parts)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights_of(model))
    assert_close(*ends)


def embedding(sparse):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(20, 6, sparse=sparse), nn.Flatten(), nn.Linear(12, 3)
    ).double()


@pytest.mark.parametrize("method", [steppe.sam(0.1), steppe.asam(0.5)], ids=["sam", "asam"])
def test_an_ascent_on_sparse_gradients_equals_the_dense_one(method):
    ends = []
    for sparse in (False, True):
        model = embedding(sparse)
        optimizer = sgd(model)
        perturber = steppe.attach(model, optimizer, method)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            # a row that is looked up twice: its gradient looks like not coalesced
            x = torch.randint(0, 8, (8, 2), generator=generator)
            perturber.backward(lambda: loss_fn(model(x), data(step, 8)[1]))
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights_of(model))
    assert_close(*ends)


@pytest.mark.parametrize("explicit", ["backward", "passes"])
@pytest.mark.parametrize(
    "method", [steppe.rwp(0.5), steppe.m_rwp(0.5, lam=0.3), steppe.sam(0.5)], ids=lambda m: m.name
)
def test_a_model_in_evaluation_mode_trains_by_explicit_passes(method, explicit):
    """Fine-tuning with dropout off and BatchNorm as it is."""
    model, optimizer, perturber = attached(method, model=conv().double().eval())
    true = weights_of(model)
    watched = Watched(model, loss_fn)
    batches = [(images(k)[0].double(), images(k)[1]) for k in range(method.batches_needed)]
    if explicit == "backward":
        perturber.backward(watched, *batches)
    else:
        for number, run in enumerate(perturber.passes()):
            with run:
                watched(*batches[number % len(batches)]).backward()
    assert not equal(watched.seen[-1][0], true)
    assert equal(weights_of(model), true)
    assert_close(grads_of(model), watched.gradients(factors_of(method)))
    optimizer.step()
    assert perturber.step == 1


# ---------------------------------------------------------------------- what backward gives back


@pytest.mark.parametrize("kind", ["tuple", "mapping"])
@pytest.mark.parametrize(
    "method",
    [steppe.rwp(0.5), steppe.sam(0.5), steppe.m_rwp(0.5, lam=0.3), steppe.asam(0.5)],
    ids=lambda method: method.name,
)
def test_backward_hands_back_what_comes_with_the_loss(method, kind):
    model, _, perturber = attached(method)
    with torch.no_grad():
        true = model(data()[0])
    outputs = []

    def loss_of(x, y):
        output = model(x)
        outputs.append(output.detach().clone())
        loss = loss_fn(output, y)
        return (loss, output) if kind == "tuple" else {"loss": loss, "logits": output}

    found = perturber.backward(loss_of, *[data(k) for k in range(method.batches_needed)])
    loss, extra = found if kind == "tuple" else (found["loss"], found["logits"])
    assert torch.equal(extra, true if method.has_clean_pass else outputs[0])
    parts = [data(k % method.batches_needed) for k in range(len(method.passes))]
    wanted = sum(
        p.weight * loss_fn(out, y)
        for p, out, (_, y) in zip(method.passes, outputs, parts, strict=True)
    )
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)


def test_backward_hands_back_a_bare_loss_as_a_tensor():
    model, optimizer, perturber = attached(steppe.sam(0.1))
    loss = perturber.backward(lambda: loss_fn(model(data()[0]), data()[1]))
    assert isinstance(loss, torch.Tensor)
    assert not loss.requires_grad
    optimizer.step()
    step_with(perturber, model, optimizer, 1)
    assert perturber.step == 2


# ---------------------------------------------------------------------- gradients that are handed out


def with_penalty(model, x, y):
    """The loss and a penalty on its gradient with respect to the weights."""
    loss = loss_fn(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.5 * sum(g.square().sum() for g in grads)


@pytest.mark.parametrize("method", ALL)
def test_a_penalty_on_gradients_of_weights_is_weighed_once(method):
    by_passes, by_backward = attached(method, lr=0.0), attached(method, lr=0.0)
    for number, run in enumerate(by_passes[2].passes()):
        with run:
            with_penalty(by_passes[0], *data(number % method.batches_needed)).backward()
    model, _, perturber = by_backward
    parts = [data(k) for k in range(method.batches_needed)]
    if method.feed != "slices":
        perturber.backward(lambda x, y: with_penalty(model, x, y), *parts)
        assert_close(grads_of(by_passes[0]), grads_of(model))


class Adapts(nn.Module):
    """A model that takes a step of gradient descent in its forward, as MAML does."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, y):
        weights = dict(self.net.named_parameters())
        loss = loss_fn(torch.func.functional_call(self.net, weights, (x,)), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {k: w - 0.5 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
        return torch.func.functional_call(self.net, moved, (x,))


@pytest.mark.parametrize("explicit", [False, True], ids=["hooks", "passes"])
@pytest.mark.parametrize("lam", [0.3, 0.5])
def test_a_model_that_differentiates_in_its_forward_is_weighed_once(lam, explicit):
    model, optimizer, perturber = attached(steppe.m_rwp(0.05, lam=lam), lr=0.0, model=Adapts())
    twin = Adapts()
    wanted = [torch.zeros_like(p) for p in twin.parameters()]
    for part, run in enumerate(perturber.passes() if explicit else [nullcontext()] * 2):
        x, y = data(part)
        with run:
            output = model(x, y)
            twin.load_state_dict(dict(zip(twin.state_dict(), weights_of(model), strict=True)))
            loss = loss_fn(output, y)
            (loss if explicit else loss / 2).backward()
        own = torch.autograd.grad(loss_fn(twin(x, y), y), list(twin.parameters()))
        wanted = [w + (lam if part else 1 - lam) * g for w, g in zip(wanted, own, strict=True)]
    assert_close(grads_of(model), wanted)
    optimizer.step()
    assert perturber.step == 1


def test_gradients_that_are_handed_out_alone_are_no_pass():
    method = steppe.m_rwp(0.05)
    model, optimizer, perturber = attached(method)
    params = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"No gradient arrived.*call backward\(\)"):
        for run in perturber.passes():
            with run:
                torch.autograd.grad(loss_fn(model(data()[0]), data()[1]), params)
    for part in range(2):
        grads = torch.autograd.grad(loss_fn(model(data(part)[0]), data(part)[1]), params)
        for p, g in zip(params, grads, strict=True):
            p.grad = g if p.grad is None else p.grad + g
    with pytest.raises(
        RuntimeError, match=r"torch.autograd.grad\? With several passes, call backward"
    ):
        optimizer.step()


def test_a_leaf_that_is_converted_is_still_weighed():
    model, loss, _, perturber = two_optimizers(steppe.m_rwp(0.0, lam=0.3))
    for number in range(2):
        for run in perturber.passes():
            with run:
                loss(model(data()[0]), data()[1]).backward()
        weights = loss.log_weights
        twin = Weighted().to(weights.dtype)
        wanted = torch.autograd.grad(twin(net()(data()[0]), data()[1]), twin.log_weights)
        assert_close([weights.grad.double()], [wanted[0].double()], rtol=1e-6, atol=1e-7)
        perturber.new_step(drop_gradients=True)
        if number == 0:
            loss.float()


def test_a_function_without_a_gradient_for_a_leaf_is_served():
    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    model, _, perturber = attached(steppe.m_rwp(0.05, lam=0.3))
    for run in perturber.passes():
        with run:
            nothing = Undefined.apply(model[0].bias).sum() * 0
            (loss_fn(model(data()[0]), data()[1]) + nothing).backward()
    assert all(p.grad is not None for p in model.parameters())


# ---------------------------------------------------------------------- leaves that come later


def unequal_step(way, perturber, model, loss):
    """One step of m-RWP at lam 0.3 whose loss may have weights of its own; the gradients by hand."""
    watched = Watched(model, loss)
    for part, run in enumerate(perturber.passes() if way == "passes" else [nullcontext()] * 2):
        x, y = data(part)
        with run:
            output = model(x)
            watched.seen.append((weights_of(model), x, y))
            value = loss(output, y)
            (value if way == "passes" else value / 2).backward()
    return watched.gradients([0.7, 0.3])


WAYS = pytest.mark.parametrize("way", ["passes", "micro-batches"])


@WAYS
@pytest.mark.parametrize("hidden", [False, True], ids=["made later", "gc.freeze"])
@pytest.mark.parametrize("between", [False, True], ids=["at once", "after a forward"])
def test_an_optimizer_that_is_found_when_it_steps_raises(way, hidden, between):
    """Before its step is made, where that shows; otherwise in the next pass, before another one is."""
    model, loss = net(), Weighted()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.m_rwp(0.05, lam=0.3))
    other = sgd(loss) if hidden else None
    if hidden:
        gc.collect()
        gc.freeze()
    else:
        unequal_step(way, perturber, model, loss_fn)
        optimizer.step()
        other = sgd(loss)
    try:
        unequal_step(way, perturber, model, loss)
        optimizer.step()
        before = loss.log_weights.detach().clone()
        if between:
            loss_fn(net()(data()[0]), data()[1])
            other.step()
            with pytest.raises(RuntimeError, match=r"shape \(3,\).*step was made with"):
                unequal_step(way, perturber, model, loss)
        else:
            with pytest.raises(
                RuntimeError, match=r"shape \(3,\).*its gradient looks like.*backward"
            ):
                other.step()
            assert equal([before], [loss.log_weights])
    finally:
        gc.unfreeze()
    true = weights_of(model)
    perturber.new_step(drop_gradients=True)
    assert equal(true, weights_of(model))
    assert_close(unequal_step(way, perturber, model, loss), grads_of(model, loss))


@pytest.mark.parametrize("explicit", ["passes", "backward"])
def test_sam_notices_a_late_optimizer(explicit):
    model, loss = net(), Weighted()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.sam(0.1))
    with pytest.raises(RuntimeError, match=r"shape \(3,\)"):
        for step in range(5):
            if step == 3:
                other = sgd(loss)
            criterion = loss if step >= 3 else loss_fn
            if explicit == "backward":
                perturber.backward(lambda x, y: criterion(model(x), y), data())
            else:
                for run in perturber.passes():
                    with run:
                        criterion(model(data()[0]), data()[1]).backward()
            optimizer.step()
            if step >= 3:
                other.step()
            optimizer.zero_grad()


@WAYS
def test_an_optimizer_that_steps_before_the_attached_one_raises_at_once(way):
    model, loss = net(), Weighted()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.m_rwp(0.05, lam=0.3))
    unequal_step(way, perturber, model, loss_fn)
    optimizer.step()
    other = sgd(loss)
    for part, run in enumerate(perturber.passes() if way == "passes" else [nullcontext()] * 2):
        with run:
            loss(model(data(part)[0]), data(part)[1]).backward()
    with pytest.raises(RuntimeError, match=r"shape \(3,\).*its gradient looks like"):
        other.step()
    loss.zero_grad()
    perturber.new_step(drop_gradients=True)
    assert_close(unequal_step(way, perturber, model, loss), grads_of(model, loss))


@WAYS
@pytest.mark.parametrize("accumulates", [1, 2])
def test_another_model_that_comes_later_trains_on_its_own(way, accumulates):
    model, optimizer, perturber = attached(steppe.m_rwp(0.05, lam=0.3))
    unequal_step(way, perturber, model, loss_fn)
    optimizer.step()
    other = net()
    theirs = sgd(other, 0.1)
    for step in range(3):
        optimizer.zero_grad()
        unequal_step(way, perturber, model, loss_fn)
        if accumulates > 1:
            optimizer.step()
        for part in range(accumulates):
            loss_fn(other(data(part)[0]), data(step)[1]).backward()
        if accumulates == 1:
            optimizer.step()
        theirs.step()
    assert perturber.step == 4


@WAYS
@pytest.mark.parametrize("group", ["another optimizer", "a new group", "the same group"])
def test_a_head_that_is_replaced_is_weighed(way, group):
    model, optimizer, perturber = attached(steppe.m_rwp(0.05, lam=0.3))
    unequal_step(way, perturber, model, loss_fn)
    optimizer.step()
    optimizer.zero_grad()
    model[2] = nn.Linear(8, 3, dtype=torch.float64)
    if group == "the same group":
        optimizer.param_groups[0]["params"][2:] = model[2].parameters()
    elif group == "a new group":
        optimizer.add_param_group({"params": model[2].parameters()})
    assert_close(unequal_step(way, perturber, model, loss_fn), grads_of(model))
    if group == "the same group":
        perturber.restore()


def test_the_hook_on_all_optimizers_goes_with_the_perturber():
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    for detach in (True, False):
        model, _, perturber = attached(steppe.m_rwp(0.05, lam=0.3))
        unequal_step("passes", perturber, model, loss_fn)
        assert len(_global_optimizer_pre_hooks) > before
        if detach:
            perturber.detach()
        del model, _, perturber
        gc.collect()
        assert len(_global_optimizer_pre_hooks) == before


def test_a_compiled_step_of_another_optimizer_is_served():
    model, loss = net(), Weighted()
    optimizer, other = sgd(model), sgd(loss)
    perturber = steppe.attach(model, optimizer, steppe.m_rwp(0.05, lam=0.3))
    take_step = torch.compile(other.step, backend="eager")
    for _ in range(2):
        wanted = unequal_step("passes", perturber, model, loss)
        assert_close(grads_of(model, loss), wanted)
        optimizer.step()
        take_step()
        optimizer.zero_grad()
        other.zero_grad()
    assert perturber.step == 2
