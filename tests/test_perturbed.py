"""`steppe.perturbed`: noise for as long as a block runs, on any module, and exact weights after it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of
from tests.parallel.harness import run
from tests.parallel.test_fsdp import Net, assert_close, data, full, sharded


def noise_of(model, **options):
    true = weights_of(model)
    with steppe.perturbed(model, **options):
        moved = weights_of(model)
    assert equal(true, weights_of(model))
    return [m - t for m, t in zip(moved, true, strict=True)]


def test_the_noise_is_a_function_of_the_seed_and_never_of_the_global_generator():
    model = Net()
    before = torch.get_rng_state()
    first, again, other = (noise_of(model, seed=s, ratio=0.3) for s in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert equal(first, again)
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.any())
    opposite = noise_of(model, seed=1, ratio=-0.3)
    assert_close(first, [-e for e in opposite], 1e-14)
    assert not any(e.any() for e in noise_of(model, seed=1, ratio=0))


def test_filters_move_by_the_ratio_of_their_norm_independently_of_each_other():
    model = nn.ModuleList(nn.Linear(4000, 3, bias=False).double() for _ in range(3))
    noise = noise_of(model, seed=0, ratio=0.3)
    sizes = [
        eps.norm(dim=1) / p.norm(dim=1) for eps, p in zip(noise, model.parameters(), strict=True)
    ]
    # a chi variable with 4,000 degrees of freedom: relative std 1 / sqrt(8000) = .011; five of them
    assert_close(sizes, [torch.full((3,), 0.3).double()] * 3, 0.3 * 5 * 0.0112)
    rows = torch.cat(noise)
    correlations = torch.corrcoef(rows) - torch.eye(9)
    assert correlations.abs().max() < 5 / 4000**0.5


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Stop])
def test_every_exit_restores_and_keeps_the_error(error):
    model = mlp()
    true = weights_of(model)
    with pytest.raises(error), steppe.perturbed(model, seed=0, ratio=0.5):
        assert not equal(true, weights_of(model))
        raise error
    assert equal(true, weights_of(model))
    with pytest.raises(ZeroDivisionError), steppe.perturbed(model, seed=0, ratio=0.5):
        model[0].weight.data.zero_()  # somebody writes, and an error of the user's own comes first
        raise ZeroDivisionError
    assert equal(true, weights_of(model))


def test_who_writes_inside_the_block_is_told_and_the_true_weights_are_back():
    model = mlp()
    true = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RuntimeError, match=r"perturbed\(\) block.*an optimizer's step"),
        steppe.perturbed(model, seed=0, ratio=0.5),
    ):
        loss_fn(model(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
    assert equal(true, weights_of(model))


def test_gradients_at_perturbed_weights_can_be_taken():
    model, (x, y) = mlp(), batch(0)
    with steppe.perturbed(model, seed=0, ratio=0.5):
        moved = weights_of(model)
        loss_fn(model(x), y).backward()
    other = mlp()
    with torch.no_grad():
        for p, m in zip(other.parameters(), moved, strict=True):
            p.copy_(m)
    loss_fn(other(x), y).backward()
    assert equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_a_second_perturbation_is_refused_in_any_order():
    model, (x, y) = mlp(), batch(0)
    true = weights_of(model)
    with steppe.perturbed(model, seed=0, ratio=0.5):
        for part in (model, model[0]):
            with (
                pytest.raises(RuntimeError, match="perturbed already"),
                steppe.perturbed(part, seed=1, ratio=0.5),
            ):
                pass
        with steppe.perturbed(mlp(), seed=0, ratio=0.5):  # another model
            pass
    for outer, inner in ((0.5, 0), (0, 0.5), (0, 0)):  # a ratio of 0 is a perturbation too
        with (
            pytest.raises(RuntimeError, match="perturbed already"),
            steppe.perturbed(model, seed=0, ratio=outer),
            steppe.perturbed(model, seed=1, ratio=inner),
        ):
            pass
    assert equal(true, weights_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    perturber = steppe.attach(model, optimizer, steppe.rwp(ratio=0.3))
    with steppe.perturbed(model, seed=0, ratio=0.5), pytest.raises(RuntimeError, match="already"):
        model(x)
    assert equal(true, weights_of(model))
    loss = loss_fn(model(x), y)
    with (
        pytest.raises(RuntimeError, match="end the pass"),
        steppe.perturbed(model, seed=0, ratio=0.5),
    ):
        pass
    loss.backward()
    optimizer.step()
    assert perturber.step == 1
    assert equal(true, weights_of(model))


def test_looking_under_noise_leaves_training_as_it_was():
    def trained(looks):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steppe.attach(model, optimizer, steppe.arwp(ratio=0.3))
        for step in range(4):
            loss_fn(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            for seed in range(looks):
                with steppe.perturbed(model.eval(), seed=seed, ratio=0.2), torch.inference_mode():
                    model(batch(step)[0])
            model.train()
        return weights_of(model)

    assert equal(trained(0), trained(3))


def test_frozen_tied_and_odd_parameters():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6))
    model[1].weight = model[0].weight
    model.requires_grad_(False)
    model.register_parameter("counts", nn.Parameter(torch.arange(3), requires_grad=False))
    free = noise_of(model, seed=0, ratio=0.3)
    named = dict(zip(dict(model.named_parameters()), free, strict=True))
    assert named["0.weight"].all()
    assert not named["counts"].any()
    assert not named["2.bias"].any()  # in ratio to a norm of 0
    left = noise_of(model, seed=0, ratio=0.3, exclude="1.*")  # the second name of a tied one
    assert not left[list(named).index("0.weight")].any()
    with torch.inference_mode(), steppe.perturbed(model, seed=0, ratio=0.3):
        model[0](torch.arange(3))
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(2, 4)
        outputs = []
        for ratio in (0, 0.5, 0):
            with steppe.perturbed(model, seed=0, ratio=ratio):
                outputs.append(model[1](x))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_what_cannot_be_perturbed_is_refused():
    for model, options, error, words in (
        (3, {"ratio": 0.1}, TypeError, "torch.nn.Module, got int"),
        (nn.ReLU(), {"ratio": 0.1}, ValueError, "the model has no floating-point parameter"),
        (mlp(), {"ratio": 0.1, "exclude": "*"}, ValueError, r"exclude='\*' leaves out every"),
        (mlp(), {"ratio": float("nan")}, ValueError, "ratio must be finite, got nan"),
        (mlp(), {"ratio": "x"}, TypeError, "ratio must be a number, got 'x'"),
        (mlp(), {"ratio": True}, TypeError, "ratio must be a number, got True"),
        (mlp(), {"ratio": 0.1, "seed": 0.5}, TypeError, "seed must be an int, got 0.5"),
    ):
        with (
            pytest.raises(error, match=words),
            steppe.perturbed(model, **{"seed": 0, **options}),
        ):
            pass


def sharded_noise(rank, placement):
    model = sharded(init_device_mesh("cpu", (2,)), placement)
    model.eval()(data(0)[0])  # leaves gathered weights at the root
    true = full(model.parameters())
    with steppe.perturbed(model, seed=5, ratio=0.3):
        output = model(data(0)[0]).detach()
        moved = full(model.parameters())
    after = model(data(0)[0]).detach()
    assert equal(true, full(model.parameters()))
    return output, after, moved


@pytest.mark.parametrize("placement", [None, "columns"])
def test_two_shards_see_the_noise_of_one_process(placement):
    model = Net().eval()
    with steppe.perturbed(model, seed=5, ratio=0.3):
        output, moved = model(data(0)[0]).detach(), weights_of(model)
    after = model(data(0)[0]).detach()
    assert not torch.allclose(output, after)
    for found in run(2, sharded_noise, placement):
        assert_close([output, after], found[:2], 1e-12)
        assert_close(moved, found[2], 1e-14)
