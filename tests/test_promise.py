"""The promise: outside a forward and its backward, the weights you see are the true weights."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of

METHODS = {
    "rwp": steppe.rwp(0.05),
    "arwp": steppe.arwp(0.05),
    "elementwise": steppe.arwp(0.05, elementwise=True),
    "msam": steppe.msam(0.5),
}


@pytest.fixture(params=METHODS)
def attached(request):
    """A model after one step, with a method that hooks serve in one pass."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, METHODS[request.param])
    loss_fn(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, perturber


def next_step_works(model, optimizer):
    loss_fn(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_error_in_forward(attached):
    model, optimizer, _ = attached
    true = weights_of(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 5))
    assert equal(true, weights_of(model))
    next_step_works(model, optimizer)


def test_error_in_the_loss_is_mended_by_the_next_consumer(attached):
    model, optimizer, perturber = attached
    true = weights_of(model)
    output = model(batch()[0])
    with pytest.raises(ValueError, match="batch_size"):
        loss_fn(output, torch.zeros(3, dtype=torch.long))
    del output
    assert equal(true, [model.state_dict()[k] for k in model.state_dict()])
    next_step_works(model, optimizer)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("planned")


def test_error_in_backward_before_it_reaches_the_model(attached):
    model, optimizer, perturber = attached
    true = weights_of(model)
    loss = FailsInBackward.apply(loss_fn(model(batch()[0]), batch()[1]))
    with pytest.raises(ValueError, match="planned"):
        loss.backward()
    perturber.restore()
    assert equal(true, weights_of(model))
    next_step_works(model, optimizer)


def test_error_inside_the_models_backward_restores_by_itself(attached):
    model, optimizer, _ = attached

    def fail(grad):
        raise ValueError("planned")

    true = weights_of(model)
    handle = model[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="planned"):
        loss_fn(model(batch()[0]), batch()[1]).backward()
    assert equal(true, weights_of(model)), "direct read after an error in backward"
    handle.remove()
    optimizer.zero_grad()
    next_step_works(model, optimizer)


def test_interrupt_inside_forward_is_mended_by_the_next_consumer(attached):
    model, optimizer, perturber = attached

    def interrupt(*_):
        raise KeyboardInterrupt

    true = weights_of(model)
    handle = model[1].register_forward_hook(interrupt)
    for mend in ("state_dict", "eval", "restore", "forward"):
        with pytest.raises(KeyboardInterrupt):
            model(batch()[0])
        if mend == "state_dict":
            model[2].state_dict()
        elif mend == "restore":
            perturber.restore()
        elif mend == "eval":
            handle.remove()
            with torch.no_grad():
                model(batch()[0])
            handle = model[1].register_forward_hook(interrupt)
        if mend != "forward":
            assert equal(true, weights_of(model)), mend
    handle.remove()
    next_step_works(model, optimizer)


def test_a_discarded_loss(attached):
    model, optimizer, perturber = attached
    true = weights_of(model)
    model(batch()[0])
    with torch.no_grad():
        model(batch()[0])
    assert equal(true, weights_of(model))
    model(batch()[0])
    model(batch()[0])
    perturber.restore()
    assert equal(true, weights_of(model))
    model(batch()[0])
    next_step_works(model, optimizer)


def test_evaluation_sees_true_weights(attached):
    model, _, _ = attached
    x, _ = batch()
    reference = copy.deepcopy(model)
    for how in ("eval", "no_grad", "inference", "eval with gradients"):
        output = model(x)  # weights are perturbed now
        if how == "eval":
            model.eval()
            with torch.no_grad():
                found = model(x)
            model.train()
        elif how == "no_grad":
            with torch.no_grad():
                found = model(x)
        elif how == "inference":
            with torch.inference_mode():
                found = model(x)
        else:
            model.eval()
            found = model(x)
            model.train()
        assert torch.equal(found, reference(x)), how
        del output


def test_state_dicts_of_model_and_parts_and_loading(attached):
    model, optimizer, _ = attached
    true = weights_of(model)
    for part in (model, model[0], model[2]):
        model(batch()[0])
        part.state_dict()
        assert equal(true, weights_of(model))
    saved = {k: v.clone() + 1 for k, v in model.state_dict().items()}
    model(batch()[0])
    model.load_state_dict(saved)
    assert equal(list(saved.values()), weights_of(model)), "loading in the middle of a step"
    next_step_works(model, optimizer)


def test_optimizer_step_in_the_middle_uses_true_weights(attached):
    model, optimizer, _ = attached
    loss_fn(model(batch()[0]), batch()[1]).backward()
    model(batch(1)[0])
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model(batch(1)[0])
    optimizer.step()
    other.step()
    assert equal(weights_of(twin), weights_of(model))


@pytest.mark.parametrize("looks", ["no_grad", "state_dict"])
def test_a_graph_whose_weights_were_put_back_is_refused(attached, looks):
    model, _, _ = attached
    loss = loss_fn(model(batch()[0]), batch()[1])
    if looks == "no_grad":
        with torch.no_grad():
            model(batch()[0])
    else:
        model.state_dict()
    true = weights_of(model)
    with pytest.raises(RuntimeError, match=r"put back since.*perturber\.passes"):
        loss.backward()
    assert equal(true, weights_of(model))


def test_two_backwards_over_one_forward_are_refused(attached):
    model, _, _ = attached
    loss = loss_fn(model(batch()[0]), batch()[1])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="put back since"):
        loss.backward()


def test_two_forwards_then_two_backwards_are_refused_and_one_backward_over_both_works(attached):
    model, optimizer, perturber = attached
    first, second = (loss_fn(model(batch(i)[0]), batch(i)[1]) for i in range(2))
    first.backward()
    with pytest.raises(RuntimeError, match="put back since"):
        second.backward()
    optimizer.zero_grad()
    true = weights_of(model)
    first, second = (loss_fn(model(batch(i)[0]), batch(i)[1]) for i in range(2))
    (first + second).backward()
    assert equal(true, weights_of(model))
    assert perturber.stats()["passes_since_step"] == 2  # this one and the first above
    optimizer.step()


def test_create_graph_is_refused_and_an_explicit_pass_serves_it(attached):
    model, optimizer, perturber = attached
    true = weights_of(model)
    x, y = batch()
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss_fn(model(x), y), x, create_graph=True)
    assert equal(true, weights_of(model))
    for run in perturber.passes():
        with run:
            loss = loss_fn(model(x), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
    assert equal(true, weights_of(model))
    optimizer.step()


def test_looking_inside_an_explicit_pass_is_never_silent(attached):
    model, _, perturber = attached
    true = weights_of(model)
    (run,) = perturber.passes()
    with pytest.raises(RuntimeError, match="put back in the middle of Run"), run:
        model.state_dict()
        assert equal(true, weights_of(model))
    (run,) = perturber.passes()
    with pytest.raises(RuntimeError, match="put back in the middle of Run"), run:
        model.eval()
        with torch.no_grad():
            model(batch()[0])
        model.train()
        model(batch()[0])
    assert equal(true, weights_of(model))


def test_a_forward_without_gradients_in_training_mode_belongs_to_the_pass_held_open(attached):
    """Losses that cache embeddings run the model once without gradients, then again in backward."""
    model, _, perturber = attached
    x, y = batch()
    (run,) = perturber.passes()
    with run:
        with torch.no_grad():
            without = model(x)
        output = model(x)
        assert torch.equal(without, output)
        loss_fn(output, y).backward()
    assert perturber.stats()["passes_since_step"] == 1


def test_copies_made_in_the_middle_of_a_step_are_inert(attached):
    model, _, _ = attached
    model(batch()[0])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        before = weights_of(other)
        other(batch()[0])
        assert equal(before, weights_of(other))
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        steppe.attach(other, optimizer, steppe.rwp(0.01))


def test_no_gradient_reaches_a_parameter_for_an_adversarial_input():
    """A backward for the input's gradient alone is not one of the passes."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.m_rwp(0.05))
    for part in range(2):
        x, y = batch(part)
        x.requires_grad_()
        torch.autograd.grad(loss_fn(model(x), y), x)
        assert perturber.stats()["passes_since_step"] == part
        (loss_fn(model(x.detach()), y) / 2).backward()
    optimizer.step()


def test_outputs_that_pytree_cannot_open_are_refused():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            result = type("Result", (), {})()
            result.logits = self.net(x)
            return result

    model = Opaque()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.01))
    true = weights_of(model)
    with pytest.raises(RuntimeError, match=r"no differentiable tensor.*\(got Result\)"):
        model(batch()[0])
    assert equal(true, weights_of(model))
    perturber.backward(lambda: loss_fn(model(batch()[0]).logits, batch()[1]))
    optimizer.step()


def test_outputs_in_dictionaries_and_tuples_work():
    class Rich(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            logits = self.net(x)
            return {"logits": logits, "extra": (logits * 2, [logits.detach(), "text", None])}

    model = Rich()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.01))
    true = weights_of(model)
    output = model(batch()[0])
    (loss_fn(output["logits"], batch()[1]) + output["extra"][0].sum()).backward()
    assert equal(true, weights_of(model))
    assert perturber.stats()["passes_since_step"] == 1, "two outputs are one pass"


def test_a_model_called_inside_an_except_block_is_perturbed_as_ever(attached):
    model, optimizer, _ = attached
    try:
        raise ValueError
    except ValueError:
        next_step_works(model, optimizer)
