"""FSDP2 and HSDP: sharded weights, against one process."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import steppe
from steppe.distributed import Shards
from steppe.noise import Draw
from steppe.weights import Weights
from tests.nets import batch, equal, loss_fn, weights_of
from tests.parallel.harness import run


class Net(nn.Module):
    """Rows that shards divide unevenly, vectors that they cut through, a scalar-like vector."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.middle = nn.Linear(9, 7)
        self.gain = nn.Parameter(torch.tensor([1.3]))
        self.head = nn.Linear(7, 3)
        self.double()

    def forward(self, x):
        return self.head(self.gain * torch.tanh(self.middle(torch.tanh(self.norm(self.first(x))))))


def data(step, rank=0):
    return batch(100 * step + rank, dtype=torch.float64)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sharded(mesh, placement=None, reshard=True):
    model = Net()
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    if placement is not None:
        # by columns where FSDP can: it wants those to divide evenly
        options["shard_placement_fn"] = lambda p: Shard(1) if p.shape[-1] == 6 else None
    fully_shard(model.middle, **options)
    fully_shard(model, **options)
    return model


def full(tensors):
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for t in tensors]


def history_of(perturber):
    states = perturber.state_dict()["states"]
    return full(t for state in states for value in state.values() for t in value)


def assert_close(first, second, tolerance=1e-9):
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


METHODS = {
    "rwp": steppe.rwp(0.05),
    "rwp ratio": steppe.rwp(ratio=0.3),
    "arwp": steppe.arwp(0.05, eta=5.0),
    "elementwise": steppe.arwp(0.05, eta=5.0, elementwise=True),
    "sam": steppe.sam(0.2),
    "asam": steppe.asam(0.5),
    "msam": steppe.msam(0.5),
}


def train_sharded(rank, method, placement=None, reshard=True):
    """Train, evaluate in the middle, train on; every rank has its own batch."""
    world = torch.distributed.get_world_size()
    model = sharded(init_device_mesh("cpu", (world,)), placement, reshard)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    outputs = []
    for step in range(4):
        x, y = data(step, rank)
        if method.in_sequence:
            perturber.backward(lambda: loss_fn(model(x), y))
        else:
            loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            outputs.append(model(data(0)[0]).clone())
        model.train()
    return full(model.parameters()), history_of(perturber), outputs


def train_whole(method, world):
    """The same in one process, on all ranks' batches at once."""
    model = Net()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    outputs = []
    for step in range(4):
        parts = [data(step, rank) for rank in range(world)]
        x, y = (torch.cat(t) for t in zip(*parts, strict=True))
        perturber.backward(lambda: loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            outputs.append(model(data(0)[0]).clone())
        model.train()
    return weights_of(model), history_of(perturber), outputs


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_sharded_training_equals_one_process(name, world):
    expected = train_whole(METHODS[name], world)
    for found in run(world, train_sharded, METHODS[name]):
        for a, b in zip(expected, found, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("name", ["rwp", "arwp", "sam"])
def test_filters_whose_rows_are_split_over_shards(name):
    expected = train_whole(METHODS[name], 2)
    for found in run(2, train_sharded, METHODS[name], "columns"):
        for a, b in zip(expected, found, strict=True):
            assert_close(a, b)


def test_weights_kept_gathered_after_forward_are_not_stale():
    expected = train_whole(METHODS["rwp"], 2)
    for found in run(2, train_sharded, METHODS["rwp"], None, False):
        assert_close(expected[0], found[0])
        assert_close(expected[2], found[2])


def noise_on(rank):
    world = torch.distributed.get_world_size()
    model = sharded(init_device_mesh("cpu", (world,)))
    perturber = steppe.attach(model, sgd(model), steppe.rwp(0.05))
    engine = perturber._training
    true = full(model.parameters())
    engine.move(0, Draw(7, 3))
    moved = full(model.parameters())
    engine.restore()
    assert equal(true, full(model.parameters()))
    return moved


def test_the_noise_does_not_depend_on_the_number_of_shards():
    whole = Net()
    perturber = steppe.attach(whole, sgd(whole), steppe.rwp(0.05))
    perturber._training.move(0, Draw(7, 3))
    expected = weights_of(whole)
    for world in (2, 3, 4):
        for found in run(world, noise_on):
            assert_close(expected, found, 1e-14)


def measured_on(rank):
    """<eps, g> for gradients that are sharded, and notes of gradients that are whole."""
    world = torch.distributed.get_world_size()
    model = Net() if world == 1 else sharded(init_device_mesh("cpu", (world,)), "columns")
    weights = Weights(list(model.named_parameters()), sgd(model), Shards(model))
    loss_fn(model(data(0)[0]), data(0)[1]).backward()
    grads = [p.grad for p in model.parameters()]
    weights.save()
    weights.add_noise(Draw(7, 3), 0.05 * weights.filter_norms())
    slope = weights.dot_eps(grads)
    weights.restore()
    return slope, steppe.AdaptiveGaussian(0.05).collect(weights, full(grads), 1.0)


def test_the_slope_along_eps_and_notes_do_not_depend_on_the_number_of_shards():
    ((slope, notes),) = run(1, measured_on)
    assert slope != 0
    for found, noted in run(3, measured_on):
        assert_close([slope, *notes], [found, *noted])


def looks_alone(rank):
    """Only rank 0 prints and asks for statistics, as people do."""
    model = sharded(init_device_mesh("cpu", (2,)))
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.rwp(ratio=0.3))
    found = []
    for step in range(2):
        if rank == 0:
            assert "expected ‖eps‖/‖w‖ = 0.3" in repr(perturber)
            found.append(perturber.stats()["displacement"])
        loss_fn(model(data(step, rank)[0]), data(step, rank)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_one_rank_may_look_alone():
    assert run(2, looks_alone)[0] == pytest.approx([0.3, 0.3])


# ---------------------------------------------------------------------- HSDP


def train_hybrid(rank, method, shape, attach):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method, **attach)
    for step in range(4):
        x, y = data(step, rank)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full(model.parameters()), history_of(perturber)


def train_mixed_whole(method):
    """Ranks 0 and 1 are the clean replica, 2 and 3 the perturbed one."""
    model = Net()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    for step in range(4):
        parts = [data(step, rank) for rank in range(4)]
        clean, noisy = (
            tuple(torch.cat(t) for t in zip(*parts[k : k + 2], strict=True)) for k in (0, 2)
        )
        perturber.backward(lambda x, y: loss_fn(model(x), y), clean, noisy)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), history_of(perturber)


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_hsdp_lays_passes_over_replicas(lam):
    method = steppe.m_rwp(0.05, lam=lam)
    weights, _ = train_mixed_whole(method)
    for found, _ in run(4, train_hybrid, method, (2, 2), {}):
        assert_close(weights, found)


def first_history(rank, parts):
    """One step of m-ARWP on a 2x2 mesh, its batch in equal micro-batches: the history."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    perturber = steppe.attach(model, optimizer, steppe.m_arwp(0.05, beta=0.9, lam=0.3))
    x, y = data(0, rank)
    for _ in range(parts):
        loss = loss_fn(model(x), y) / parts
        moved = [t.detach().clone() for t in perturber_weights(perturber)]
        loss.backward()
    optimizer.step()
    return moved, history_of(perturber), [slot.name for slot in perturber._training.weights.params]


def perturber_weights(perturber):
    return [slot.values for slot in perturber._training.weights.params]


@pytest.mark.parametrize("parts", [1, 2])
def test_hsdp_history_is_the_mean_over_the_perturbed_ranks_own_gradients(parts):
    results = run(4, first_history, parts)
    squares = []
    for rank in (2, 3):
        # both shards of the perturbed replica together are its full weights
        parts = [torch.cat([results[2][0][i], results[3][0][i]]) for i in range(len(results[2][0]))]
        model = Net()
        order = dict(zip(results[rank][2], parts, strict=True))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(order[name])
        x, y = data(0, rank)
        loss_fn(model(x), y).backward()
        grads = dict(model.named_parameters())
        squares.append(torch.cat([_squares(grads[name].grad) for name in results[rank][2]]))
    for _, history, _ in results:
        assert_close([(squares[0] + squares[1]) / 2], history)


def _squares(grad):
    return grad.flatten(1).square().sum(1) if grad.dim() > 1 else grad.square().sum().reshape(1)


def test_hsdp_with_one_pass_draws_per_replica_and_stays_identical():
    results = run(4, train_hybrid, steppe.arwp(0.05, eta=5.0), (2, 2), {})
    for found, history in results[1:]:
        assert equal(results[0][0], found)
        assert equal(results[0][1], history)


def refusals(rank):
    mesh = init_device_mesh("cpu", (2,))
    messages = []
    for method, options in (
        (steppe.m_rwp(0.05), {}),
        (steppe.rwp(0.05), {"noise": "rank"}),
        (steppe.sam(0.05), {"ascent": "rank"}),
    ):
        model = sharded(mesh)
        try:
            steppe.attach(model, sgd(model), method, **options)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_what_a_one_dimensional_mesh_cannot_do():
    for messages in run(2, refusals):
        assert "2-D mesh" in messages[0]
        assert "different noise" in messages[1]
        assert 'ascent="global"' in messages[2]


def other_shardings(rank):
    """Tensor parallel alone, under FSDP2, and a part that is on another mesh."""
    line, square = (
        init_device_mesh("cpu", (4,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")),
    )

    def parallel(mesh, columns=("first",)):
        model = Net()
        parallelize_module(model, mesh, dict.fromkeys(columns, ColwiseParallel()))
        return model

    both = parallel(square["tensor"])
    fully_shard(both, mesh=square["data"])
    every = nn.Sequential(nn.Linear(6, 8, bias=False))
    parallelize_module(every, square["tensor"], {"0": ColwiseParallel()})
    fully_shard(every, mesh=square["data"])
    parts = Net()
    fully_shard(parts.middle, mesh=square["tensor"])
    fully_shard(parts, mesh=line)
    messages = []
    for model in (parallel(line), both, every, parts):
        before = full(model.parameters())
        try:
            steppe.attach(model, sgd(model), steppe.rwp(0.05))
        except ValueError as error:
            messages.append(str(error))
        assert equal(before, full(model.parameters()))
    return messages


def test_shardings_that_are_not_fsdps_are_refused():
    for messages in run(4, other_shardings):
        assert len(messages) == 4
        assert all("one dimension of shards" in message for message in messages)
        assert messages[0].startswith("first.weight")
        assert "not by fully_shard()" in messages[0]


# ---------------------------------------------------------------------- checkpoints


def save(rank, folder, method, steps):
    model, optimizer, perturber = _fresh(method)
    _train(model, optimizer, range(steps), rank)
    _write(folder, model, optimizer, perturber)
    _train(model, optimizer, range(steps, 2 * steps), rank)
    return full(model.parameters()), history_of(perturber)


def resume(rank, folder, method, steps):
    model, optimizer, perturber = _fresh(method, seed=99)
    _read(folder, model, optimizer, perturber)
    loaded = history_of(perturber)
    _train(model, optimizer, range(steps, 2 * steps), rank)
    return full(model.parameters()), history_of(perturber), loaded, perturber.step


def _fresh(method, seed=0):
    world = torch.distributed.get_world_size()
    model = sharded(init_device_mesh("cpu", (world,)))
    optimizer = sgd(model)
    return model, optimizer, steppe.attach(model, optimizer, method, seed=seed)


def _train(model, optimizer, steps, rank):
    world = torch.distributed.get_world_size()
    for step in steps:
        # the same four batches in all, however many ranks share them
        parts = [data(step, k) for k in range(4)][rank * 4 // world : (rank + 1) * 4 // world]
        x, y = (torch.cat(t) for t in zip(*parts, strict=True))
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _states(model, optimizer, perturber):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, optim = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": optim, "perturber": perturber.state_dict()}


def _write(folder, model, optimizer, perturber):
    dcp.save(_states(model, optimizer, perturber), checkpoint_id=folder)


def _read(folder, model, optimizer, perturber):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    states = _states(model, optimizer, perturber)
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    perturber.load_state_dict(states["perturber"])


@pytest.mark.parametrize("name", ["arwp", "msam", "elementwise"])
def test_resume_through_distributed_checkpoint(tmp_path, name):
    method = METHODS[name]
    whole = run(2, save, str(tmp_path / name), method, 3)
    again = run(2, resume, str(tmp_path / name), method, 3)
    for (weights, history), (found, learnt, _, step) in zip(whole, again, strict=True):
        assert equal(weights, found), "bit for bit on the same mesh"
        assert equal(history, learnt)
        assert step == 6
    other = run(4, resume, str(tmp_path / name), method, 3)
    for found, learnt, loaded, step in other:
        assert equal(again[0][2], loaded), "the state loads exactly onto another number of shards"
        assert_close(whole[0][0], found)
        assert_close(whole[0][1], learnt)
        assert step == 6
