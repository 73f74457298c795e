"""Noise on frozen layers over two processes: the base stays equal on all ranks, bit for bit."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel as DDP

import steppe
from tests.nets import loss_fn, mlp
from tests.parallel.harness import run
from tests.parallel.test_ddp import data


def lora(dtype=torch.float64):
    model = mlp(dtype=dtype)
    config = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights="gaussian")
    torch.manual_seed(1)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def train(rank, method, steps, dtype=torch.float64, **options):
    """On one of two ranks, or (rank None) in one process with the data of both."""
    model = lora(dtype)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    called = model if rank is None else DDP(model)
    perturber = steppe.attach(called, optimizer, method, **options)
    for step in range(steps):
        parts = [data(step, other) for other in ((0, 1) if rank is None else (rank,))]
        if rank is None and len(method.passes) > 1:
            for x, y in parts:
                (loss_fn(called(x.to(dtype)), y) / 2).backward()
        else:
            x, y = (torch.cat(part) for part in zip(*parts, strict=True))
            loss_fn(called(x.to(dtype)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = perturber.state_dict()["states"][0].get("steering", [torch.zeros(1)])[0].clone()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_base_is_equal_on_all_ranks_after_200_steps(dtype):
    before = dict(lora(dtype).named_parameters())
    (first, _), (second, _) = run(2, train, steppe.flat_lora(ratio=0.2), 200, dtype)
    for name, param in first.items():
        assert torch.equal(param, second[name]), name
        assert torch.equal(param, before[name]) == ("lora_" not in name), name


def shared(rank, method, steps):
    return train(rank, method, steps, noise="shared")


def test_one_eps_on_two_ranks_is_one_process():
    method = steppe.flat_lora(rise=steppe.constant(0.05))
    expected, steering = train(None, method, 12)
    for found, state in run(2, shared, method, 12):
        torch.testing.assert_close(state, steering, rtol=1e-6, atol=1e-9)
        for name, param in found.items():
            torch.testing.assert_close(param, expected[name], rtol=1e-8, atol=1e-10)


def test_the_passes_of_mixed_flat_lora_on_two_ranks_are_one_process():
    method = steppe.mixed(steppe.flat_lora(rise=steppe.constant(0.05)), lam=0.3)
    expected, steering = train(None, method, 12)
    for found, state in run(2, train, method, 12):
        torch.testing.assert_close(state, steering, rtol=1e-6, atol=1e-9)
        for name, param in found.items():
            torch.testing.assert_close(param, expected[name], rtol=1e-8, atol=1e-10)
