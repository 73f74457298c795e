"""Strength by the loss rise over several processes, against one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import steppe
from tests.nets import equal, loss_fn, mlp, weights_of
from tests.parallel.harness import run
from tests.parallel.test_ddp import assert_close, data, history_of, one_process, sgd, train

STEPS = 25


def rise(asked=0.05):
    return steppe.constant(asked)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_passes_of_a_mixed_method_on_two_ranks_equal_one_process(accumulate):
    method = steppe.m_arwp(rise=rise(), lam=0.3)
    (weights, state), (others, same) = run(2, train, method, STEPS, None, None, accumulate)
    assert_close(weights, others, 0)
    assert_close(state, same, 0)
    expected, their_state = one_process(method, STEPS, accumulate)
    assert_close(weights, expected, 1e-8)
    assert_close(state, their_state, 1e-8)


def together(rank, kind, method, accumulate):
    """Both ranks with one eps, each with half of the batch; or one process with all of it. Before some
    steps a backward is thrown away."""
    model = mlp(dtype=torch.float64)
    if kind == "DDP":
        model = DDP(model)
    elif kind == "FSDP2":
        fully_shard(model[0])
        fully_shard(model)
    optimizer = sgd(model)
    options = {"noise": "shared"} if kind == "DDP" else {}
    perturber = steppe.attach(model, optimizer, method, **options)
    for step in range(STEPS):
        parts = [data(step, other) for other in ((0, 1) if rank is None else (rank,))]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        if step % 3 == 1:
            loss_fn(model(x), y).backward()
            optimizer.zero_grad()
        for _ in range(accumulate):
            (loss_fn(model(x), y) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    return history_of(perturber)[-1]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_one_eps_on_two_ranks_is_steered_as_in_one_process(kind, accumulate):
    method = steppe.rwp(rise=rise())
    alone = together(None, "", method, accumulate)
    for found in run(2, together, kind, method, accumulate):
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-9)


def own_eps(rank, method, accumulate):
    """The running sums of the meter, and what they are by hand: the mean of <eps, g> over all perturbed
    passes of all ranks, each with its own eps and batch."""
    model = mlp(dtype=torch.float64)
    wrapped, twin = DDP(model), mlp(dtype=torch.float64)
    optimizer = sgd(model)
    perturber = steppe.attach(wrapped, optimizer, method)
    num = den = 0.0
    moved = []
    for step in range(8):
        true, r, slopes = weights_of(model), perturber.stats()["ratio"], []
        for part in range(accumulate):
            x, y = data(10 * step + part, rank)
            loss = loss_fn(wrapped(x), y) / accumulate
            here = weights_of(model)
            loss.backward()
            with torch.no_grad():
                for p, value in zip(twin.parameters(), here, strict=True):
                    p.copy_(value)
            grads = torch.autograd.grad(loss_fn(twin(x), y), list(twin.parameters()))
            if not equal(here, true):
                trios = zip(here, true, grads, strict=True)
                slopes.append(sum(((a - b) * g).sum() for a, b, g in trios))
                moved.append(here[0] - true[0])
        optimizer.step()
        optimizer.zero_grad()
        total = torch.tensor([sum(slopes), len(slopes)], dtype=torch.float64)
        dist.all_reduce(total)
        num, den = 0.98 * num + 0.02 * float(total[0] / total[1]), 0.98 * den + 0.02 * r * r
    (state,) = perturber.state_dict()["states"]
    return state["steering"][0][:2].tolist(), [num, den], moved


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [steppe.rwp, steppe.m_rwp])
def test_ranks_with_an_eps_of_their_own_measure_the_mean(make, accumulate):
    first, second = run(2, own_eps, make(rise=rise()), accumulate)
    for found, expected, _ in (first, second):
        assert found == pytest.approx(expected, rel=1e-9)
    assert second[2]
    assert not first[2] or not torch.equal(first[2][0], second[2][0])


def slopes(rank, method, draws):
    """What the steering of a mixed pass measures on a 2x2 mesh at fixed weights, step by step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = mlp(dtype=torch.float64)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    perturber = steppe.attach(model, optimizer, method)
    for _ in range(draws):
        loss_fn(model(data(0)[0]), data(0)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return perturber.stats()


@pytest.mark.slow
def test_hsdp_measures_the_rise_without_bias():
    """There only gradients averaged over replicas are to be had: noisier, but right on average."""
    method = steppe.m_rwp(rise=rise(0.02))
    stats = run(4, slopes, method, 200)
    assert all(each["measured_rise"] == stats[0]["measured_rise"] for each in stats)
    error = stats[0]["measured_rise_stderr"]
    assert error < 0.02
    assert abs(stats[0]["measured_rise"] - 0.02) < 3 * error
