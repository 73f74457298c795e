"""Histories, and how many passes a step had: micro-batches, skipped steps, checkpoints, scalers."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import steppe
from tests.nets import equal, loss_fn, weights_of
from tests.review.loops import assert_close, attached, data, grads_of, history_of, net, sgd, train

M_ARWP = steppe.m_arwp(0.05, eta=5.0)


# ---------------------------------------------------------------------- histories


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**12)


@pytest.mark.parametrize(
    "zero_grad",
    ["after the step", "before backward"],
)
def test_a_skipped_step_leaves_no_trace_in_the_history(zero_grad):
    """Batches 2 and 3 overflow; with and without them the run is the same."""
    found = []
    for overflows in (False, True):
        scale = scaler()
        model, optimizer, perturber = attached(M_ARWP, scaler=scale)
        for step in (0, 1, 2) if overflows else (0, 2):
            for part in range(2):
                x, y = data(2 * step + part)
                loss = loss_fn(model(x * float("inf") if step == 1 else x), y) / 2
                if part == 0 and zero_grad == "before backward":
                    optimizer.zero_grad()
                scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
            if zero_grad == "after the step":
                optimizer.zero_grad()
        assert perturber.step == 2
        found.append([*weights_of(model), *history_of(perturber)])
    assert_close(*found)


class Shared(nn.Module):
    """One layer that serves in three segments."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant
        self.double()

    def segment(self, x):
        return torch.tanh(self.shared(x))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(3):
            if self.reentrant is None:
                x = self.segment(x)
            else:
                x = checkpoint(self.segment, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize(
    "reentrant",
    [False, True],
)
def test_checkpointed_segments_that_share_a_layer_have_the_same_history(reentrant, elementwise):
    found = []
    for mode in (None, reentrant):
        method = steppe.m_arwp(0.05, eta=5.0, elementwise=elementwise)
        model, optimizer, perturber = attached(method, model=Shared(mode))
        train(model, optimizer, 3, accumulate=2)
        found.append([*weights_of(model), *history_of(perturber)])
    assert_close(*found)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_sam_was_not_given_is_noticed(fused):
    model, scale = net().float(), scaler()
    optimizer = sgd(model, fused=fused)
    perturber = steppe.attach(model, optimizer, steppe.sam(0.1))
    true = weights_of(model)
    scale.scale(torch.ones(()))  # it serves another loss of the loop too
    perturber.backward(lambda: loss_fn(model(data()[0].float()), data()[1]))
    with pytest.raises(RuntimeError, match=r"attach\(..., scaler=scaler\)"):
        scale.step(optimizer)
    assert equal(true, weights_of(model))


@pytest.mark.parametrize(
    "after", [lambda loss: loss, lambda loss: 2 * loss / 4, lambda loss: (loss, 1)]
)
@pytest.mark.parametrize("method", [steppe.rwp(0.05), steppe.sam(0.1)], ids=lambda m: m.name)
def test_a_loss_that_is_scaled_already_is_refused(method, after):
    model = net()
    optimizer, grad_scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    perturber = steppe.attach(model, optimizer, method, scaler=grad_scaler)
    true, (x, y) = weights_of(model), data()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"without scaler\.scale"):
            perturber.backward(lambda: after(grad_scaler.scale(loss_fn(model(x), y))))
        assert equal(weights_of(model), true)
    factor = torch.tensor(3.0, dtype=torch.float64)
    perturber.backward(lambda: factor * loss_fn(model(x), y) / 3)
    grad_scaler.step(optimizer)
    assert perturber.step == 1


def test_the_way_out_of_an_unannounced_scaler_is_the_loss_as_it_is():
    model = net()
    optimizer, grad_scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.05))
    perturber.backward(lambda: grad_scaler.scale(loss_fn(model(data()[0]), data()[1])))
    with pytest.raises(RuntimeError, match=r"Let loss_of return the loss without scaler\.scale"):
        grad_scaler.step(optimizer)


# ---------------------------------------------------------------------- numbers of micro-batches


def train_off_by_one(model, optimizer, batches):
    """Steps after batches 0, 2, 4: the first step has one micro-batch, the others two."""
    for step in range(batches):
        (loss_fn(model(data(step)[0]), data(step)[1]) / 2).backward()
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_a_loop_that_steps_first_after_one_micro_batch_is_warned():
    model, optimizer, perturber = attached(steppe.m_rwp(0.05))
    with pytest.warns(UserWarning, match=r"\(step \+ 1\) %") as caught:
        train_off_by_one(model, optimizer, 7)
    assert len(caught) == 1
    assert perturber.step == 4
    assert perturber.stats()["incomplete_steps"] == 1


def test_a_loop_whose_steps_are_never_complete_is_stopped_at_the_second():
    model, optimizer, perturber = attached(steppe.m_rwp(0.05))
    with pytest.warns(UserWarning, match="micro-batches"):
        train(model, optimizer, 1)
    true = weights_of(model)
    with pytest.raises(RuntimeError, match="micro-batches"):
        train(model, optimizer, 1)
    assert equal(true, weights_of(model))
    assert perturber.step == 1


def test_a_first_incomplete_step_raises_where_that_was_asked_for():
    model, optimizer, _ = attached(steppe.m_rwp(0.05), on_incomplete="raise")
    with pytest.raises(RuntimeError, match="micro-batches"):
        train(model, optimizer, 1)


# ---------------------------------------------------------------------- two losses, one step


def hinge(real, output):
    return torch.relu(1 - output if real else 1 + output).mean()


def cross_entropy(real, output):
    target = torch.full_like(output, float(real))
    return nn.functional.binary_cross_entropy_with_logits(output, target)


def critic():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def patch_critic():
    """One that judges patches: a map of outputs for each sample, beside features."""
    parts = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Conv1d(4, 1, 2)
    torch.manual_seed(0)
    return nn.Sequential(*parts).double()


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = critic()

    def forward(self, x):
        features = self.critic[:2](x)
        return {"features": features, "logits": self.critic[2](features)}


def train_critic(model, optimizer, loss_of, steps=5):
    for step in range(steps):
        x = data(step)[0]
        for real, shift in ((True, 1), (False, -1)):
            output = model(x + shift)
            output = output["logits"] if isinstance(output, dict) else output
            loss_of(real, output).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [critic, patch_critic, Features])
@pytest.mark.parametrize("loss_of", [cross_entropy, hinge], ids=lambda f: f.__name__)
@pytest.mark.parametrize("method", [steppe.m_rwp(0.05), M_ARWP], ids=lambda method: method.name)
def test_a_discriminator_is_warned_that_its_losses_are_taken_for_micro_batches(
    method, loss_of, kind
):
    model, optimizer, _ = attached(method, model=kind().double())
    with pytest.warns(UserWarning, match=r"passes\(\)"):
        train_critic(model, optimizer, loss_of)


@pytest.mark.parametrize("convention", ["mean", "sum"])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_ordinary_micro_batches_are_not_warned(accumulate, convention):
    model, optimizer, perturber = attached(M_ARWP, microbatch_loss=convention)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            for part in range(accumulate):
                x, y = data(step * accumulate + part, size=6)
                loss = loss_fn(model(x), y)
                (loss / accumulate if convention == "mean" else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert perturber.step == 6


def test_outputs_that_are_not_numbers_are_no_discriminator():
    """Whether losses differ is not asked of an empty or complex output, nor of a gradient of NaN."""

    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return torch.complex(self.net(x), self.net(x))

    x, _ = data()
    for model, inputs, loss_of in (
        (Complex(), x, lambda z: z.abs().sum()),
        (net(), x[:0], torch.sum),
        (net(), x, lambda z: z.sum() * torch.nan),
    ):
        model, optimizer, perturber = attached(steppe.m_rwp(0.05), model=model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                for sign in (1, -1):
                    (sign * loss_of(model(inputs))).backward()
                optimizer.step()
        assert perturber.step == 3


def test_one_class_per_micro_batch_is_not_warned_if_it_changes_sides():
    """Sorted data: a micro-batch may have a single class, now in the first place, now in the second."""
    model, optimizer, _ = attached(M_ARWP, model=critic())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            for part in range(2):
                real = (step + part) % 2 == 0
                (cross_entropy(real, model(data(2 * step + part)[0])) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()


# ---------------------------------------------------------------------- gradients inside of a pass

SEVERAL = pytest.mark.parametrize(
    "method",
    [steppe.m_rwp(0.05), steppe.m_rwp(0.05, lam=0.3), steppe.antithetic_rwp(0.05), steppe.sam(0.1)],
    ids=["m_rwp", "m_rwp lam", "antithetic_rwp", "sam"],
)


def by_way(way, perturber, loss_of):
    """One step over the same batch, by `backward` or by explicit passes."""
    if way == "backward":
        perturber.backward(loss_of, *[data()] * perturber.batches_needed)
    else:
        for run in perturber.passes():
            with run:
                loss_of(*data()).backward()


@pytest.mark.parametrize("to_none", [True, False], ids=["None", "zeros"])
@pytest.mark.parametrize("way", ["passes", "backward"])
@SEVERAL
def test_gradients_that_are_dropped_inside_of_a_pass_are_noticed(method, way, to_none):
    model, optimizer, perturber = attached(method)
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=to_none)

    def loss_of(x, y):
        optimizer.zero_grad()
        return loss_fn(model(x), y)

    if method.name == "sam":  # its first pass does not count
        by_way(way, perturber, loss_of)
        found = grads_of(model)
        perturber.new_step(drop_gradients=True)
        by_way(way, perturber, lambda x, y: loss_fn(model(x), y))
        assert_close(found, grads_of(model))
        return
    true = weights_of(model)
    with pytest.raises(RuntimeError, match=r"thrown away inside of Run\(1.*zero_grad\(\) before"):
        by_way(way, perturber, loss_of)
    assert equal(true, weights_of(model))


@pytest.mark.parametrize("way", ["passes", "backward"])
@SEVERAL
def test_old_gradients_may_be_dropped_inside_of_the_first_pass(method, way):
    model, optimizer, perturber = attached(method, lr=0.0)
    for _ in range(2):
        passes = iter(method.passes)

        def loss_of(x, y, passes=passes):
            if (
                next(passes) is method.passes[0] or method.name == "sam"
            ):  # its first one does not count
                optimizer.zero_grad()
            return loss_fn(model(x), y)

        by_way(way, perturber, loss_of)
        optimizer.step()
    assert perturber.step == 2
    twin, theirs, another = attached(method, lr=0.0)
    for _ in range(2):
        theirs.zero_grad()
        by_way(way, another, lambda x, y: loss_fn(twin(x), y))
        theirs.step()
    assert_close(grads_of(model), grads_of(twin))


def test_part_of_the_gradients_that_is_dropped_is_noticed():
    model = net()
    optimizer, other = sgd(model[0]), sgd(model[2])
    perturber = steppe.attach(model, optimizer, steppe.m_rwp(0.05))
    with pytest.raises(RuntimeError, match="thrown away inside of"):
        for run in perturber.passes():
            with run:
                other.zero_grad()
                loss_fn(model(data()[0]), data()[1]).backward()


@pytest.mark.parametrize("before", [False, True], ids=["none", "some"])
@SEVERAL
def test_a_loss_that_is_differentiated_in_part_is_refused(method, before):
    model, _, perturber = attached(method)
    if before:
        loss_fn(model.eval()(data()[0]), data()[1]).backward()
        model.train()
    true = weights_of(model)

    def loss_of(x, y):
        (loss_fn(model(x[:6]), y[:6]) / 2).backward()
        return loss_fn(model(x[6:]), y[6:]) / 2

    with pytest.raises(RuntimeError, match=r"loss_of ran a backward of its own.*perturber\.passes"):
        by_way("backward", perturber, loss_of)
    assert equal(true, weights_of(model))


def test_a_loss_that_is_differentiated_in_part_serves_a_method_of_one_pass():
    model, _, perturber = attached(steppe.rwp(0.05))
    other, _, theirs = attached(steppe.rwp(0.05))

    def loss_of(x, y):
        (loss_fn(model(x[:6]), y[:6]) / 2).backward()
        return loss_fn(model(x[6:]), y[6:]) / 2

    perturber.backward(loss_of, data())
    theirs.backward(lambda x, y: loss_fn(other(x), y), data())
    assert_close(grads_of(model), grads_of(other))
