"""What is left behind: after `detach()`, after something failed half-way, and after Ctrl-C."""

import pytest
import torch

import steppe
from tests.nets import equal, loss_fn, weights_of
from tests.review.loops import attached, data

RWP = steppe.rwp(0.5)


# ---------------------------------------------------------------------- detach()


@pytest.mark.parametrize("compiled", ["in place", "around"])
def test_a_model_that_was_compiled_since_is_free_after_detach(compiled):
    torch._dynamo.reset()
    model, optimizer, perturber = attached(RWP)
    call = model
    if compiled == "in place":
        model.compile(backend="eager")
    else:
        call = torch.compile(model, backend="eager")
    x, y = data()
    for _ in range(2):
        loss_fn(call(x), y).backward()
        optimizer.step()
    assert perturber.step == 2
    perturber.detach()
    true = weights_of(model)
    loss = loss_fn(call(x), y)
    assert equal(weights_of(model), true)
    loss.backward()

    again = steppe.attach(model, optimizer, RWP)
    loss = loss_fn(call(x), y)
    assert not equal(weights_of(model), true)
    loss.backward()
    assert equal(weights_of(model), true)
    again.detach()
