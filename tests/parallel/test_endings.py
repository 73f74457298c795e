"""The end of a run: nothing of ours, and no wrapped model, is alive when the group is destroyed."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import steppe
from tests.nets import batch, loss_fn, mlp
from tests.parallel.harness import run


def wrapped(kind):
    if kind == "DDP":
        return DDP(mlp())
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names) if kind == "HSDP" else None
    model = mlp()
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(rank, kind, method):
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, method)
    x, y = batch(rank)
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return model, optimizer, perturber, loss


def what_detach_leaves(rank, kind, method):
    """Which modules are alive after detach() and del, although the perturber is kept; and under
    DDP the loss (FSDP2's own graph holds its modules)."""
    model, optimizer, perturber, loss = trained(rank, kind, method)
    shown, saved = str(perturber), perturber.state_dict()
    modules = {type(m).__name__: weakref.ref(m) for m in model.modules()}
    perturber.detach()
    perturber.detach()
    del model, optimizer
    if kind != "DDP":
        del loss
    gc.collect()
    alive = [name for name, module in modules.items() if module() is not None]
    same = [str(perturber) == shown, perturber.state_dict()["parameters"] == saved["parameters"]]
    return alive, same, perturber.step


METHODS = {"DDP": steppe.m_arwp(0.05), "FSDP2": steppe.arwp(0.05), "HSDP": steppe.m_arwp(0.05)}


def test_detach_leaves_no_reference_to_the_model():
    for kind, method in METHODS.items():
        assert run(2, what_detach_leaves, kind, method) == [([], [True, True], 1)] * 2, kind


def what_is_left_without_detach(rank, kind, method):
    modules = weakref.WeakSet(trained(rank, kind, method)[0].modules())
    gc.collect()
    return [type(module).__name__ for module in modules]


def test_a_model_that_was_never_detached_is_collected():
    for kind, method in METHODS.items():
        assert run(2, what_is_left_without_detach, kind, method) == [[], []], kind


def keeps_its_model(rank):
    wrapped.kept = wrapped("DDP")


def test_the_harness_fails_a_job_whose_group_outlives_its_end():
    with pytest.raises(AssertionError, match="model still refers to it"):
        run(2, keeps_its_model)


@pytest.fixture
def alone(monkeypatch):
    """Options of a group of one process, and a list of the models alive when it was destroyed."""
    models, alive = weakref.WeakSet(), []
    created, destroy = DDP.__init__, dist.destroy_process_group

    def create(self, *args, **kwargs):
        models.add(self)
        created(self, *args, **kwargs)

    def look_and_destroy(group=None):
        alive.append(len(models))
        destroy(group)

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(DDP, "__init__", create)
    monkeypatch.setattr(dist, "destroy_process_group", look_and_destroy)
    return {"store": dist.HashStore(), "rank": 0, "world_size": 1}, alive


def train_in_a_cycle(error=None):
    model = DDP(mlp())
    model.myself = [model]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.05))
    x, y = batch()
    loss_fn(model(x), y).backward()
    optimizer.step()
    if error is not None:
        raise error
    return perturber.step


def fail_and_rename():
    try:
        train_in_a_cycle(KeyError("inner"))
    except KeyError:
        raise ValueError("outer") from None


def test_models_are_released_before_the_group_is_destroyed(alone):
    options, alive = alone
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with steppe.process_group("gloo", **options):
            assert train_in_a_cycle() == 1
    assert alive == [0]
    assert not dist.is_initialized()


def test_models_are_released_after_an_error_too(alone):
    options, alive = alone
    with pytest.raises(KeyboardInterrupt), steppe.process_group("gloo", **options):
        train_in_a_cycle(KeyboardInterrupt())
    with pytest.raises(ValueError, match="outer"), steppe.process_group("gloo", **options):
        fail_and_rename()
    assert alive == [0, 0]
    assert not dist.is_initialized()


def test_a_model_that_is_kept_is_pointed_out(alone):
    options, alive = alone
    kept = []
    with pytest.warns(UserWarning, match="still refers to it.*in a function that returns") as seen:
        with_group(options, lambda: kept.append(DDP(mlp())))
    assert alive == [1]
    assert seen[0].filename == __file__
    assert not dist.is_initialized()


def with_group(options, call):
    with steppe.process_group("gloo", **options):
        call()
