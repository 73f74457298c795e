"""Whose statistics BatchNorm keeps, and taking them anew at the true weights."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import steppe
from tests.nets import conv, equal, images, loss_fn, weights_of


def buffers(model):
    return [b.clone() for b in model.buffers()]


def attached(method):
    model = conv()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, optimizer, steppe.attach(model, optimizer, method)


def plain_statistics(*parts):
    """What a plain net's buffers are after these batches, at the true weights."""
    model = conv()
    for part in parts:
        model(images(part)[0])
    return buffers(model)


@pytest.mark.parametrize(
    "method", [steppe.m_rwp(0.5), steppe.m_arwp(0.5), steppe.mixed(steppe.msam())]
)
def test_mixed_methods_update_statistics_in_clean_passes_only(method):
    model, optimizer, perturber = attached(method)
    for step in range(2):
        for part in range(2):
            x, y = images(2 * step + part)
            (loss_fn(model(x), y) / 2).backward()
        optimizer.step()
    assert equal(plain_statistics(0, 2), buffers(model))
    assert int(model[1].num_batches_tracked) == 2
    assert all(m.track_running_stats for m in (model[1], model[4]))


@pytest.mark.parametrize("method", [steppe.sam(0.5), steppe.asam()])
def test_sam_updates_statistics_in_its_first_pass_only(method):
    model, optimizer, perturber = attached(method)
    x, y = images(0)
    perturber.backward(lambda: loss_fn(model(x), y))
    assert equal(plain_statistics(0), buffers(model))


def test_methods_without_a_clean_pass_update_statistics_in_every_pass():
    model, optimizer, perturber = attached(steppe.antithetic_rwp(0.05))
    x, y = images(0)
    perturber.backward(lambda: loss_fn(model(x), y))
    assert int(model[1].num_batches_tracked) == 2
    assert not equal(plain_statistics(0, 0), buffers(model)), "statistics of perturbed weights"


def test_one_infinite_batch_in_a_perturbed_pass_leaves_the_statistics():
    model, _, perturber = attached(steppe.m_rwp(0.05))
    x, y = images(0)
    perturber.backward(lambda x, y: loss_fn(model(x), y), (x, y), (x * float("inf"), y))
    assert equal(plain_statistics(0), buffers(model))


def test_statistics_thaw_after_an_error():
    model, _, perturber = attached(steppe.sam(0.05))
    calls = []

    def loss_of():
        calls.append(1)
        if len(calls) == 2:
            assert not model[1].track_running_stats
            raise ValueError("planned")
        return loss_fn(model(images()[0]), images()[1])

    with pytest.raises(ValueError, match="planned"):
        perturber.backward(loss_of)
    assert model[1].track_running_stats


def test_layers_that_the_user_froze_stay_frozen():
    model, _, perturber = attached(steppe.m_rwp(0.05))
    model[1].eval()
    before = buffers(model[1])
    x, y = images(0)
    perturber.backward(lambda x, y: loss_fn(model(x), y), (x, y), (x, y))
    assert equal(before, buffers(model[1]))
    assert model[1].track_running_stats


def rested(model, steps=1, perturber_state=None):
    """After default `rwp()` at learning rate 0: the model and its perturber."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    perturber = steppe.attach(model, optimizer, steppe.rwp())
    if perturber_state is not None:
        perturber.load_state_dict(perturber_state)
    for _ in range(steps):
        x, y = images(perturber.step, size=4)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, perturber


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_statistics_of_a_pretrained_net_follow_by_the_layers_momentum(norm):
    """Fresh ones (of a new head) by their plain mean: a rest step must not replace what is known."""
    model = nn.Sequential(norm(3, track_running_stats=True), conv())
    for step in range(30):
        model[0](images(step)[0])
    known = model[0].running_mean.clone()
    rested(model)
    x = images(0, size=4)[0]
    expected = 0.9 * known + 0.1 * x.mean((0, 2, 3))
    torch.testing.assert_close(model[0].running_mean, expected)
    hidden = model[1][0](model[0](x))
    torch.testing.assert_close(model[1][1].running_mean, hidden.mean((0, 2, 3)))


@pytest.mark.parametrize("pretrained", [False, True])
def test_statistics_resume_bit_exactly_while_they_are_fresh(pretrained):
    first = conv()
    if pretrained:
        first(images(77)[0])
    second = copy.deepcopy(first)
    rested(first, 30)
    _, perturber = rested(second, 20)
    state = copy.deepcopy(perturber.state_dict())
    perturber.detach()
    rested(second, 10, state)
    assert equal(buffers(first), buffers(second))


def test_a_compiled_net_has_three_variants_and_the_same_statistics():
    """Perturbed, and at rest with fresh statistics and with older ones: not one for each rest step."""
    torch._dynamo.reset()
    counter, model, plain = CompileCounter(), conv(), conv()
    rested(torch.compile(model, backend=counter), 100)
    rested(plain, 100)
    assert counter.frame_count <= 3
    torch.testing.assert_close(buffers(model), buffers(plain))


def test_recompute_norm_stats_weighs_uneven_batches_by_size():
    model = conv()
    x, y = images(0, size=20)
    parts = [(x[:16], y[:16]), (x[16:], y[16:])]
    steppe.recompute_norm_stats(model, parts)
    first = model[0]
    with torch.no_grad():
        out = [first(part[0]) for part in parts]
    means = torch.stack([o.mean((0, 2, 3)) for o in out])
    variances = torch.stack([o.var((0, 2, 3)) for o in out])
    share = torch.tensor([[0.8], [0.2]])
    torch.testing.assert_close(model[1].running_mean, (share * means).sum(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        model[1].running_var, (share * variances).sum(0), rtol=1e-4, atol=1e-6
    )
    assert model[1].momentum == 0.1
    assert int(model[1].num_batches_tracked) == 2


def test_recompute_norm_stats_runs_at_the_true_weights_and_leaves_the_rest():
    model = nn.Sequential(conv(), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steppe.attach(model, optimizer, steppe.rwp(0.5))
    model[0][4].eval()
    true = weights_of(model)
    model(images(0)[0])  # leaves perturbed weights behind
    random = torch.get_rng_state()
    steppe.recompute_norm_stats(model, [images(0), images(1)])
    assert equal(true, weights_of(model))
    assert torch.equal(random, torch.get_rng_state()), "no dropout was drawn"
    assert model.training
    assert not model[0][4].training
    twin = nn.Sequential(conv(), nn.Dropout(0.5))
    steppe.recompute_norm_stats(twin, [images(0)[0], {"input": images(1)[0]}])
    assert equal(buffers(twin), buffers(model))


def test_recompute_norm_stats_with_a_call_of_the_users():
    model = conv()
    steppe.recompute_norm_stats(model, [{"image": images(0)[0]}], call=lambda b: model(b["image"]))
    twin = conv()
    steppe.recompute_norm_stats(twin, [images(0)])
    assert equal(buffers(twin), buffers(model))


def test_recompute_norm_stats_without_batches_or_layers():
    model = conv()
    before = buffers(model)
    with pytest.raises(ValueError, match="got no batches"):
        steppe.recompute_norm_stats(model, [])
    assert equal(before, buffers(model))
    steppe.recompute_norm_stats(nn.Linear(2, 2), [])
    with pytest.raises(TypeError, match="must hold a tensor with a batch dimension, got str"):
        steppe.recompute_norm_stats(model, ["x"])
