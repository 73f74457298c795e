"""The end of a run: nothing of ours, and no wrapped model, is alive when the group is destroyed."""

import gc
import weakref

import torch
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
