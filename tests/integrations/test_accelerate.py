"""`accelerator.prepare`, then `attach`: nothing else is needed."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of

ARWP = steppe.arwp(0.05, eta=5.0)
M_ARWP = steppe.m_arwp(0.05, eta=5.0, lam=0.3)


@pytest.fixture(autouse=True)
def _one_accelerator_at_a_time():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(method, *, count=6, epochs=2, accumulate=1, clip=None, look=None, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = DataLoader([batch(i) for i in range(count)], batch_size=1, collate_fn=lambda x: x[0])
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    perturber = steppe.attach(model, optimizer, method)
    for _ in range(epochs):
        for x, y in data:
            with accelerator.accumulate(model):
                if method.repeats_batch:
                    perturber.backward(lambda: loss_fn(model(x), y))
                else:
                    accelerator.backward(loss_fn(model(x), y))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            if look:
                look(accelerator, model)
    return model, perturber


def by_hand(method, *, count=6, epochs=2, accumulate=1, clip=None):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, method)
    for _ in range(epochs):
        for number in range(count):
            x, y = batch(number)
            if method.repeats_batch:
                perturber.backward(lambda: loss_fn(model(x), y))
            else:
                (loss_fn(model(x), y) / accumulate).backward()
            if (number + 1) % accumulate and number + 1 < count:
                continue
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model, perturber


def same_training(found, expected):
    (model, perturber), (other, twin) = found, expected
    assert perturber.step == twin.step > 0
    assert equal(weights_of(model), weights_of(other))
    (state,), (their_state,) = perturber.state_dict()["states"], twin.state_dict()["states"]
    for name, tensors in state.items():
        assert equal(tensors, their_state[name])


@pytest.mark.parametrize(
    ("method", "accumulate", "clip"),
    [
        (ARWP, 1, 0.05),
        (ARWP, 3, None),
        (M_ARWP, 2, 0.05),
        (steppe.sam(0.1), 1, None),
        (steppe.rwp(rise=0.5), 2, 0.05),
    ],
    ids=["arwp", "arwp accumulating", "m_arwp", "sam", "rise"],
)
def test_prepare_then_attach_equals_a_loop_by_hand(method, accumulate, clip):
    found = train(method, accumulate=accumulate, clip=clip)
    same_training(found, by_hand(method, accumulate=accumulate, clip=clip))


@pytest.mark.parametrize(
    "method", [steppe.rwp(rise=0.5), steppe.arwp(rise=0.5)], ids=["rwp", "arwp"]
)
def test_a_rise_is_the_same_after_50_steps(method):
    """When the ramp is open."""
    found = train(method, epochs=18, accumulate=2)
    expected = by_hand(method, epochs=18, accumulate=2)
    assert found[1].step > 50
    assert found[1].stats()["ratio"] > 0.002
    same_training(found, expected)


def test_the_odd_tail_of_an_epoch():
    with pytest.warns(UserWarning, match="passes present add up to one"):
        found = train(M_ARWP, count=5, accumulate=2)
    with pytest.warns(UserWarning, match="passes present add up to one"):
        expected = by_hand(M_ARWP, count=5, accumulate=2)
    same_training(found, expected)


def test_hooks_are_on_the_optimizer_that_steps_and_its_scaler_is_found():
    class Scaled(Accelerator):
        """Accelerate makes a scaler for CUDA alone; the wrapper takes any."""

        def prepare_optimizer(self, optimizer, device_placement=None):
            prepared = super().prepare_optimizer(optimizer, device_placement)
            return type(prepared)(prepared.optimizer, scaler=self.scaler)

    accelerator = Scaled(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, prepared = accelerator.prepare(model, optimizer)
    perturber = steppe.attach(model, prepared, M_ARWP)
    assert perturber._training.optimizer is optimizer
    assert perturber._training.scaler is accelerator.scaler
    for number in range(6):
        x, y = batch(number)
        accelerator.backward(loss_fn(model(x), y) / 2)
        if number % 2:
            prepared.step()
            prepared.zero_grad()
    model, twin = by_hand(M_ARWP, epochs=1, accumulate=2)
    assert perturber.step == twin.step
    (state,), (their_state,) = perturber.state_dict()["states"], twin.state_dict()["states"]
    torch.testing.assert_close(state["history"], their_state["history"], rtol=1e-4, atol=1e-8)


def test_bf16():
    model, perturber = train(M_ARWP, accumulate=2, mixed_precision="bf16")
    other, _ = by_hand(M_ARWP, accumulate=2)
    for found, wanted in zip(weights_of(model), weights_of(other), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
    assert perturber.step == 6


def test_checkpoints_hold_true_weights_and_the_perturbers_state(tmp_path):
    """`register_for_checkpointing` takes a perturber as it is."""
    whole, ended = train(ARWP, epochs=2)
    parts = None
    for half in range(2):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        perturber = steppe.attach(model, optimizer, ARWP)
        accelerator.register_for_checkpointing(perturber)
        if half:
            accelerator.load_state(tmp_path)
            assert equal(weights_of(model), parts)
        for number in range(6):
            accelerator.backward(loss_fn(model(batch(number)[0]), batch(number)[1]))
            optimizer.step()
            optimizer.zero_grad()
        if not half:
            parts = weights_of(model)
            model(batch()[0])  # a forward whose loss is thrown away
            assert not equal(weights_of(model), parts)
            accelerator.save_state(tmp_path)
    same_training((model, perturber), (whole, ended))
