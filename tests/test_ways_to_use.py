"""The three ways to use it: an unchanged loop, explicit passes, a loss and its batches; and closures."""

import pytest
import torch
from torch import nn

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of


def attached(method, lr=0.1, **options):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, optimizer, steppe.attach(model, optimizer, method, **options)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


ONE_PASS = {
    "rwp": steppe.rwp(0.05),
    "arwp": steppe.arwp(0.05, eta=5.0),
    "msam": steppe.msam(0.5),
    "sgd": steppe.sgd(),
}


@pytest.mark.parametrize("name", ONE_PASS)
def test_all_ways_give_the_same_run_for_one_pass_methods(name):
    ends = []
    for way in ("hooks", "passes", "backward", "lambda", "closure"):
        model, optimizer, perturber = attached(ONE_PASS[name])
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            if way == "hooks":
                loss_fn(model(x), y).backward()
            elif way == "passes":
                for run in perturber.passes():
                    with run:
                        loss_fn(model(x), y).backward()
            elif way == "backward":
                perturber.backward(lambda x, y: loss_fn(model(x), y), (x, y))
            elif way == "lambda":
                perturber.backward(lambda: loss_fn(model(x), y))
            if way == "closure":

                def closure():
                    optimizer.zero_grad()
                    loss = loss_fn(model(x), y)
                    loss.backward()
                    return loss

                optimizer.step(closure)
            else:
                optimizer.step()
        assert perturber.step == 4
        ends.append(weights_of(model))
    for end in ends[1:]:
        assert equal(ends[0], end)


def test_the_weights_are_perturbed_in_forward_and_backward_and_true_after():
    model, optimizer, perturber = attached(steppe.rwp(0.05))
    true = weights_of(model)
    x, y = batch()
    loss = loss_fn(model(x), y)
    assert not equal(true, weights_of(model))
    loss.backward()
    assert equal(true, weights_of(model))
    optimizer.step()
    assert not equal(true, weights_of(model))


@pytest.mark.parametrize("method", [steppe.sam(0.1), steppe.asam(), steppe.antithetic_rwp(0.05)])
def test_same_batch_methods_run_from_a_closure_as_from_backward(method):
    ends = []
    for by_closure in (True, False):
        model, optimizer, perturber = attached(method)
        for step in range(4):
            x, y = batch(step)

            def closure():
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                return loss

            if by_closure:
                value = optimizer.step(closure)
            else:
                optimizer.zero_grad()
                value = perturber.backward(lambda x, y: loss_fn(model(x), y), (x, y))
                optimizer.step()
        ends.append((weights_of(model), float(value)))
    assert equal(ends[0][0], ends[1][0])
    assert ends[0][1] == pytest.approx(ends[1][1])


def test_a_closure_that_does_not_zero_gradients_sees_no_stale_ones():
    model, optimizer, _ = attached(steppe.sam(0.1))
    other, other_optimizer, _ = attached(steppe.sam(0.1))
    for net, opt, zero in ((model, optimizer, True), (other, other_optimizer, False)):
        for step in range(3):
            x, y = batch(step)

            def closure():
                if zero:
                    opt.zero_grad()
                loss = loss_fn(net(x), y)
                loss.backward()
                return loss

            opt.step(closure)
    assert equal(weights_of(model), weights_of(other))


def test_a_keyword_closure_is_served_too():
    model, optimizer, perturber = attached(steppe.sam(0.1))

    def closure():
        optimizer.zero_grad()
        loss = loss_fn(model(batch()[0]), batch()[1])
        loss.backward()
        return loss

    optimizer.step(closure=closure)
    assert perturber.step == 1


def test_closures_are_refused_where_batches_are_needed():
    for method, way in (
        (steppe.m_rwp(0.01), r"backward\(loss_of, batch1, batch2\)"),
        (steppe.lpf_sgd(0.01), r"backward\(loss_of, batch\)"),
        (steppe.sam(m=4), r"backward\(loss_of, batch\)"),
    ):
        model, optimizer, _ = attached(method)
        true = weights_of(model)
        with pytest.raises(RuntimeError, match=way):
            optimizer.step(lambda: None)
        assert equal(true, weights_of(model))


def test_an_optimizer_that_repeats_its_closure_is_refused():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            closure()

    model = mlp()
    optimizer = Twice(model.parameters(), lr=0.1)
    steppe.attach(model, optimizer, steppe.rwp(0.01))

    def closure():
        loss = loss_fn(model(batch()[0]), batch()[1])
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="Twice calls its closure more than once"):
        optimizer.step(closure)


@pytest.mark.parametrize(
    "method",
    [steppe.sam(), steppe.asam(), steppe.m_rwp(0.01, same_batch=True), steppe.sam(m=4)],
    ids=["sam", "asam", "same batch", "sam m"],
)
def test_what_hooks_cannot_serve_raises_at_once_and_names_the_way(method):
    model, _, _ = attached(method)
    true = weights_of(model)
    with pytest.raises(RuntimeError, match=r"hooks cannot give.\nUse perturber.backward\(lambda"):
        model(batch()[0])
    assert equal(true, weights_of(model))


def test_passes_with_zip_give_the_mixed_gradient():
    method = steppe.m_rwp(0.05, lam=0.3)
    model, _, perturber = attached(method)
    other, _, reference = attached(method)
    batches = [batch(0), batch(1)]
    for run, (x, y) in zip(perturber.passes(), batches, strict=False):
        with run:
            loss_fn(model(x), y).backward()
    reference.backward(lambda x, y: loss_fn(other(x), y), *batches)
    # one weighs gradients at the leaves, the other the loss: equal to rounding
    for found, wanted in zip(gradients(model), gradients(other), strict=True):
        torch.testing.assert_close(found, wanted)


def test_runs_say_what_they_are():
    _, _, perturber = attached(steppe.m_rwp(0.05, lam=0.3))
    clean, perturbed = perturber.passes()
    assert repr(clean) == "Run(0, clean, weight=0.7)"
    assert repr(perturbed) == "Run(1, perturbed, weight=0.3)"
    assert (clean.perturbed, perturbed.perturbed) == (False, True)


def test_misused_runs_raise():
    model, _, perturber = attached(steppe.sam(0.1))
    first, second = perturber.passes()
    with pytest.raises(RuntimeError, match="needs the gradient of the pass before it"):
        second.__enter__()
    with first:
        with pytest.raises(RuntimeError, match="is still open"):
            second.__enter__()
        loss_fn(model(batch()[0]), batch()[1]).backward()
    with pytest.raises(RuntimeError, match="was entered before"):
        first.__enter__()
    third, _ = perturber.passes()
    with pytest.raises(RuntimeError, match=r"No gradient arrived in Run\(0, clean"), third:
        model(batch()[0])


def test_wrong_numbers_of_batches_raise_and_say_what_to_pass():
    cases = [
        (steppe.m_arwp(0.01), 1, r"a batch for each of its 2 passes, got 1.*batch1, batch2"),
        (steppe.m_arwp(0.01), 0, r"a batch for each of its 2 passes, got 0"),
        (steppe.sam(), 2, r"sam\(\) takes one batch, got 2"),
        (steppe.lpf_sgd(0.01), 0, r"lpf_sgd\(\) takes one batch, got 0"),
        (steppe.sam(m=4), 0, r"sam\(\) takes one batch, got 0"),
        (steppe.rwp(0.01), 2, r"rwp\(\) takes one batch, got 2"),
    ]
    for method, count, message in cases:
        model, _, perturber = attached(method)
        with pytest.raises(ValueError, match=message):
            perturber.backward(lambda x, y: loss_fn(model(x), y), *[batch()] * count)


def test_batches_that_cannot_be_sliced_raise():
    model, _, perturber = attached(steppe.lpf_sgd(0.01, samples=8))
    x, y = batch(size=5)
    with pytest.raises(ValueError, match="A batch of 5 cannot be cut into 8 slices"):
        perturber.backward(lambda x, y: loss_fn(model(x), y), (x, y))
    with pytest.raises(ValueError, match=r"one size along dimension 0, got sizes \[4, 5\]"):
        perturber.backward(lambda x, y: loss_fn(model(x), y), (x, y[:4]))


def test_backward_refuses_what_is_not_a_loss():
    model, _, perturber = attached(steppe.rwp(0.01))
    true = weights_of(model)
    x, y = batch()
    with pytest.raises(TypeError, match=r"takes a function that gives the loss, got Tensor"):
        perturber.backward(torch.ones(()))
    with pytest.raises(TypeError, match=r"a tensor with one value; got \(16, 3\)"):
        perturber.backward(lambda: model(x))
    with pytest.raises(TypeError, match="a tensor with one value; got NoneType"):
        perturber.backward(lambda: None)
    assert equal(true, weights_of(model))


def test_a_batch_may_be_a_tensor_or_a_dictionary():
    model, optimizer, perturber = attached(steppe.m_rwp(0.01))
    perturber.backward(lambda x: model(x).square().mean(), batch(0)[0], batch(1)[0])
    optimizer.step()
    perturber.backward(
        lambda b: loss_fn(model(b["x"]), b["y"]),
        dict(zip("xy", batch(0), strict=True)),
        dict(zip("xy", batch(1), strict=True)),
    )
    optimizer.step()
    assert perturber.step == 2


def test_backward_may_be_called_several_times_a_step_to_accumulate():
    method = steppe.m_arwp(0.05, eta=5.0)
    model, optimizer, perturber = attached(method)
    for part in range(2):
        perturber.backward(
            lambda x, y: loss_fn(model(x), y) / 2, batch(2 * part), batch(2 * part + 1)
        )
    other, _, reference = attached(method)
    for part in range(2):
        reference.backward(lambda x, y: loss_fn(other(x), y), batch(2 * part), batch(2 * part + 1))
    for ours, theirs in zip(gradients(model), gradients(other), strict=True):
        torch.testing.assert_close(ours, theirs / 2)
    optimizer.step()
    assert perturber.step == 1


def test_sam_keeps_gradients_that_were_there_before():
    model, _, perturber = attached(steppe.sam(0.1))
    other, _, reference = attached(steppe.sam(0.1))
    x, y = batch()
    perturber.backward(lambda: loss_fn(model(x), y))
    once = gradients(model)
    perturber.backward(lambda: loss_fn(model(x), y))
    for twice, single in zip(gradients(model), once, strict=True):
        torch.testing.assert_close(twice, 2 * single)
    reference.backward(lambda: loss_fn(other(x), y))
    assert equal(once, gradients(other))


def test_a_step_without_a_pass_raises():
    model, optimizer, _ = attached(steppe.rwp(0.01))
    loss_fn(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    model.eval()
    loss_fn(model(batch()[0]), batch()[1]).backward()
    with pytest.raises(RuntimeError, match="Is it in eval mode"):
        optimizer.step()
    model.train()
    inner = nn.Sequential(*model)
    loss_fn(inner(batch()[0]), batch()[1]).backward()
    with pytest.raises(RuntimeError, match="Is an inner module called instead"):
        optimizer.step()


def test_a_step_that_only_allocates_the_optimizers_state_is_not_counted():
    """As torch.distributed.checkpoint takes one: zero gradients, learning rate 0, no pass."""
    model, optimizer, perturber = attached(steppe.arwp(0.01), lr=0.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step(closure=None)
    assert perturber.step == 0
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(RuntimeError, match="without a pass"):
        optimizer.step()
    loss_fn(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert perturber.step == 1


def test_a_detached_perturber_says_so():
    model, optimizer, perturber = attached(steppe.rwp(0.01))
    perturber.detach()
    with pytest.raises(RuntimeError, match="was detached"):
        perturber.backward(lambda: model(batch()[0]).sum())
    steppe.attach(model, optimizer, steppe.rwp(0.01))


def test_a_closure_without_a_backward_raises_instead_of_losing_gradients():
    model, optimizer, _ = attached(steppe.rwp(0.05))
    loss_fn(model(batch()[0]), batch()[1]).backward()
    with pytest.raises(RuntimeError, match="ran no backward.*step without one"):
        optimizer.step(lambda: None)
