"""What a method asks of a device: few operations, no values, nothing from the host."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import steppe
from steppe.weights import Weights
from tests.methods import METHODS

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import launches


@pytest.mark.parametrize("name", launches.METHODS)
def test_operations_do_not_grow_with_depth(name):
    # on the CPU, where operations are faster to count; these nets have one block of noise there too
    few, many = (
        launches.added(launches.METHODS[name], "transformer", layers, "cpu") for layers in (2, 5)
    )
    assert few == many <= launches.BARS["transformer"]


RESNET = ["RWP", "ARWP", "ARWP, element-wise", "SAM", "MSAM", "ARWP, rise", "m-ARWP, rise"]


@pytest.mark.parametrize("name", RESNET)
def test_operations_on_resnet18(name):
    assert launches.added(launches.METHODS[name], "resnet18") <= launches.BARS["resnet18"]


def test_the_meter_takes_few_operations():
    def counted(layers):
        bench = launches.bench("transformer", "meta", layers)
        weights = Weights(list(bench.model.named_parameters()), bench.optimizer)
        bench.backward()
        weights.save()
        weights.add_noise(steppe.noise.Draw(0, 0), torch.ones_like(weights.sizes))
        grads = [p.param.grad for p in weights.moved]
        weights.dot_eps(grads)
        return launches.operations(lambda: weights.dot_eps(grads))

    assert len(counted(2)) == len(counted(6)) <= 8


class DeviceAlone(TorchDispatchMode):
    """Raises if an operation takes or makes a tensor of the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                raise AssertionError(f"{func} has a tensor on {leaf.device}")
        return result


@pytest.mark.parametrize("name", METHODS)
def test_every_method_stays_on_its_device_and_reads_no_value(name):
    method = METHODS[name]
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
        x, y = torch.randn(8, 3, 4, 4), torch.randint(0, 3, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, method)
    batches = [(x, y)] * method.batches_needed

    def step():
        perturber.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), *batches)
        optimizer.step()
        optimizer.zero_grad()

    step()  # lays out memory
    with DeviceAlone():
        step()
    assert perturber.step == 2
