"""The frameworks' own DDP on two processes, against one process or steppe by hand."""

import os

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of
from tests.parallel.harness import run

pytestmark = pytest.mark.slow

METHODS = {
    "arwp": (steppe.arwp(0.05, eta=5.0), 1),
    "m_arwp over ranks": (steppe.m_arwp(0.05, eta=5.0, lam=0.3), 1),
    "m_arwp over ranks, accumulating": (steppe.m_arwp(0.05, eta=5.0, lam=0.3), 2),
    "sam": (steppe.sam(0.1), 2),
}
COUNT = 8
"""Batches in all; each rank takes every other one."""


def environment(rank):
    """As torchrun sets it; the process group is there already."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29400",
        TORCHELASTIC_RUN_ID="test",
    )


def history_of(perturber):
    states = perturber.state_dict()["states"]
    return [t.clone() for state in states for tensors in state.values() for t in tensors]


def by_hand(rank, method, accumulate):
    """DDP and steppe's explicit API."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, method)
    mine = range(rank, COUNT, 2)
    for number, index in enumerate(mine, start=1):
        stepping = number % accumulate == 0
        model.require_backward_grad_sync = stepping  # what no_sync() does
        x, y = batch(index)
        if method.repeats_batch:
            perturber.backward(lambda: loss_fn(model(x), y) / accumulate)
        else:
            (loss_fn(model(x), y) / accumulate).backward()
        if stepping:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model), history_of(perturber)


def with_lightning(rank, method, accumulate):
    from tests.integrations.test_lightning import Net

    module, perturb = fitted(rank, Net, method, accumulate, "ddp")
    return weights_of(module), history_of(perturb.perturber)


def fitted(rank, kind, method, accumulate, strategy):
    """A LightningModule after one epoch on two processes, and the callback."""
    environment(rank)
    from lightning.pytorch import Trainer

    from steppe.integrations.lightning import Perturb

    module, perturb = kind(), Perturb(method)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=2,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[perturb],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = DataLoader([batch(i) for i in range(rank, COUNT, 2)], batch_size=None)
    trainer.fit(module, data)
    return module, perturb


def sharded_by_lightning(rank, method):
    """Lightning's strategy for FSDP2."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from tests.integrations.test_lightning import Net

    class Sharded(Net):
        def configure_model(self):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    module, perturb = fitted(rank, Sharded, method, 1, strategy)
    return [p.full_tensor().detach() for p in module.net.parameters()], history_of(
        perturb.perturber
    )


def sharded_by_hand(rank, method):
    model = mlp()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, method)
    for index in range(rank, COUNT, 2):
        x, y = batch(index)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()], history_of(perturber)


def with_accelerate(rank, method, accumulate):
    environment(rank)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    assert accelerator.num_processes == 2
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = DataLoader([batch(i) for i in range(COUNT)], batch_size=1, collate_fn=lambda x: x[0])
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    perturber = steppe.attach(model, optimizer, method)
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model), history_of(perturber)


def with_transformers(rank, method, accumulate):
    """Two processes of PerturbTrainer; what it runs, by hand on the batches that it saw."""
    environment(rank)
    import tempfile

    from accelerate.state import AcceleratorState, GradientState

    from steppe.integrations.transformers import PerturbTrainer
    from tests.integrations import test_transformers as single

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with tempfile.TemporaryDirectory() as folder:
        trainer, perturb = single.make(
            method,
            folder,
            kind=PerturbTrainer,
            gradient_accumulation_steps=accumulate,
            num_train_epochs=1,
            ddp_backend="gloo",
        )
        trainer.train()
    assert isinstance(trainer.model_wrapped, DDP)
    model = DDP(single.language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, method)
    mine = trainer.data_collator.batches
    assert len(mine) == 3
    for start in range(0, len(mine), accumulate):
        parts = mine[start : start + accumulate]
        items = sum(part["labels"][:, 1:].ne(-100).sum() for part in parts)
        torch.distributed.all_reduce(items)
        for number, part in enumerate(parts, start=1):
            model.require_backward_grad_sync = number == len(parts)

            def loss_of():
                return 2 * model(**part, num_items_in_batch=items).loss

            if method.repeats_batch:
                perturber.backward(loss_of)
            else:
                loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = weights_of(trainer.model), history_of(perturb.perturber)
    return ours, (weights_of(model), history_of(perturber))


def check(job, method, accumulate):
    found, expected = run(2, job, method, accumulate), run(2, by_hand, method, accumulate)
    check_equal(found, expected)


def check_equal(found, expected):
    for (weights, history), (their_weights, their_history) in zip(found, expected, strict=True):
        assert equal(weights, their_weights)
        assert equal(history, their_history)
    assert equal(found[0][0], found[1][0]), "replicas stay bit-identical"
    assert not equal(found[0][0], weights_of(mlp()))


@pytest.mark.parametrize("name", METHODS)
def test_lightning(name):
    check(with_lightning, *METHODS[name])


def test_lightning_with_sharded_weights():
    method = steppe.arwp(0.05, eta=5.0)
    check_equal(run(2, sharded_by_lightning, method), run(2, sharded_by_hand, method))


@pytest.mark.parametrize("name", [n for n in METHODS if n != "sam"])
def test_accelerate(name):
    check(with_accelerate, *METHODS[name])


@pytest.mark.parametrize("name", ["m_arwp over ranks", "sam"])
def test_transformers(name):
    method, _ = METHODS[name]
    found = run(2, with_transformers, method, 1 if name == "sam" else 3)
    for ours, theirs in found:
        assert equal(ours[0], theirs[0])
        assert equal(ours[1], theirs[1])
    assert equal(found[0][0][0], found[1][0][0]), "replicas stay bit-identical"
