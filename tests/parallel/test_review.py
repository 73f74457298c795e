"""Hard cases over several processes: other optimizers, wrapped blocks, other kinds of DTensors."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of
from tests.parallel.harness import run


def data(step, rank=0):
    return batch(100 * step + rank, dtype=torch.float64)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def full(tensors):
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for t in tensors]


def history_of(perturber):
    states = perturber.state_dict()["states"]
    return full(t for state in states for value in state.values() for t in value)


def assert_close(found, wanted, tolerance=1e-9):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------- DDP: two optimizers


def gradients_of_two_optimizers(rank, lam):
    """The first layer is in the attached optimizer, the second in another."""
    model = DDP(mlp(dtype=torch.float64))
    optimizers = [sgd(model.module[0].parameters()), sgd(model.module[2].parameters())]
    steppe.attach(model, optimizers[0], steppe.m_rwp(0.05, lam=lam), noise="shared")
    x, y = data(0, rank)
    loss = loss_fn(model(x), y)
    moved = weights_of(model)
    loss.backward()
    seen = [p.grad.clone() for p in model.parameters()]
    twin = mlp(dtype=torch.float64)
    with torch.no_grad():
        for p, w in zip(twin.parameters(), moved, strict=True):
            p.copy_(w)
    own = torch.autograd.grad(loss_fn(twin(x), y), list(twin.parameters()))
    return seen, [g.clone() for g in own]


@pytest.mark.parametrize(
    "lam",
    [0.0, 0.3, 0.5, 1.0],
)
def test_parameters_of_another_optimizer_get_the_weighted_sum_under_ddp(lam):
    (seen, clean), (other, noisy) = run(2, gradients_of_two_optimizers, lam)
    assert equal(seen, other)
    assert_close(seen, [(1 - lam) * c + lam * n for c, n in zip(clean, noisy, strict=True)])


# ---------------------------------------------------------------------- HSDP: wrapped blocks


class Deep(nn.Module):
    """Blocks, as they are wrapped one by one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


WRAPPERS = {
    "plain": lambda block: block,
    "compiled": lambda block: torch.compile(block, backend="eager"),
    "checkpointed": checkpoint_wrapper,
    "checkpointed inside": lambda block: nn.Sequential(checkpoint_wrapper(block[0]), block[1]),
    "checkpointed and compiled": lambda block: torch.compile(
        checkpoint_wrapper(block), backend="eager"
    ),
}


def train_wrapped(rank, wrapper):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Deep()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = WRAPPERS[wrapper](block)
        fully_shard(model.blocks[number], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model.parameters())
    perturber = steppe.attach(model, optimizer, steppe.m_arwp(0.05, eta=5.0, lam=0.3))
    for step in range(3):
        x, y = data(step, rank)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full(model.parameters()), history_of(perturber)


@pytest.fixture(scope="module")
def unwrapped():
    found = run(4, train_wrapped, "plain")
    assert float(found[0][1][0].min()) > 0
    return found


@pytest.mark.parametrize(
    "wrapper",
    [
        "checkpointed",
        "checkpointed inside",
        "compiled",
        "checkpointed and compiled",
    ],
)
def test_wrapped_blocks_on_hsdp_have_the_same_history(wrapper, unwrapped):
    for (weights, history), (found, learnt) in zip(
        unwrapped, run(4, train_wrapped, wrapper), strict=True
    ):
        assert_close(learnt, history)
        assert_close(found, weights)


def gradients_without_noise(rank):
    """Sharded parameters that are left out of the noise, beside the same by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, twin = Deep(), Deep()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    steppe.attach(
        model, sgd(model.parameters()), steppe.m_rwp(0.0, lam=0.3), exclude=("*.bias", "head.*")
    )
    loss_fn(model(data(0, rank)[0]), data(0, rank)[1]).backward()
    by_rank = [
        torch.autograd.grad(loss_fn(twin(x), y), list(twin.parameters()))
        for x, y in (data(0, other) for other in range(4))
    ]
    first, second = ([a + b for a, b in zip(*by_rank[i : i + 2], strict=True)] for i in (0, 2))
    wanted = [0.7 * a / 2 + 0.3 * b / 2 for a, b in zip(first, second, strict=True)]
    return full(p.grad for p in model.parameters()), wanted


def test_sharded_parameters_without_noise_get_the_weighted_sum():
    for found, wanted in run(4, gradients_without_noise):
        assert_close(found, wanted)


def train_by_closures(rank):
    """FSDP2 and an optimizer that is given a closure, beside the same in one process."""
    model, twin = Deep(), Deep()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    steppe.attach(model, optimizer := sgd(model.parameters()), steppe.rwp(0.0))
    for each, its in ((model, optimizer), (twin, sgd(twin.parameters()))):

        def closure(each=each, its=its):
            its.zero_grad()
            loss = loss_fn(each(data(0)[0]), data(0)[1])
            loss.backward()
            return loss

        for _ in range(3):
            its.step(closure)
    return full(model.parameters()), full(twin.parameters())


def test_a_closure_drops_the_gradients_of_sharded_parameters_of_the_step_before():
    for found, wanted in run(2, train_by_closures):
        assert_close(found, wanted)


# ---------------------------------------------------------------------- placements


def attach_message(model):
    try:
        steppe.attach(model, sgd(model.parameters()), steppe.rwp(0.05))
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


def tensor_parallel():
    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(mlp(dtype=torch.float64), mesh, plan)


def tensor_parallel_and_sharded():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(mlp(dtype=torch.float64), mesh["tensor"], plan)
    return fully_shard(model, mesh=mesh["shard"])


def mixed_placements():
    """Somebody's own: one parameter sharded, another copied to all ranks."""
    mesh = init_device_mesh("cpu", (2,))
    model = mlp(dtype=torch.float64)
    for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
        value = distribute_tensor(getattr(model[0], name).detach(), mesh, [placement])
        setattr(model[0], name, nn.Parameter(value))
    assert isinstance(model[0].bias, DTensor)
    return model


MESHES = {
    "tensor parallel": (2, tensor_parallel),
    "tensor parallel and FSDP": (4, tensor_parallel_and_sharded),
    "mixed": (2, mixed_placements),
}


def refusal(rank, name):
    return attach_message(MESHES[name][1]())


@pytest.mark.parametrize("name", MESHES)
def test_dtensors_that_are_not_of_fsdp_are_refused(name):
    for message in run(MESHES[name][0], refusal, name):
        assert "DTensor" in message or "tensor parallel" in message
        assert "fully_shard" in message or "FSDP" in message, "it says what can be served"


class Wide(nn.Module):
    """Dimensions that two ranks divide evenly, so that either may be sharded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x):
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))


METHODS = {
    "rwp": steppe.rwp(0.05),
    "arwp": steppe.arwp(0.05, eta=5.0),
    "sam": steppe.sam(0.2),
    "asam": steppe.asam(0.5),
}


def train_by_columns(rank, method):
    """Every second matrix is sharded by columns, the others and all vectors by rows."""
    model = Wide() if rank is None else sharded_by_turns(Wide())
    optimizer = sgd(model.parameters())
    perturber = steppe.attach(model, optimizer, method)
    for step in range(3):
        parts = [data(step, k) for k in ((0, 1) if rank is None else (rank,))]
        x, y = (torch.cat(t) for t in zip(*parts, strict=True))
        perturber.backward(lambda: loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return full(model.parameters()), history_of(perturber)


def sharded_by_turns(model):
    columns = {id(model.first.weight), id(model.head.weight)}
    return fully_shard(
        model,
        mesh=init_device_mesh("cpu", (2,)),
        shard_placement_fn=lambda p: Shard(1) if id(p) in columns else Shard(0),
    )


@pytest.mark.parametrize("name", METHODS)
def test_shards_along_different_dimensions_have_the_right_norms(name):
    expected = train_by_columns(None, METHODS[name])
    for found in run(2, train_by_columns, METHODS[name]):
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)
