import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steppe import analysis
from steppe.analysis import (
    Problem,
    landscape,
    perturbation_curve,
    sharpness,
    spectrum,
    top_eigs,
)
from steppe.analysis.hessian import Hessian

from .known import quadratic, rotated, settled_net

ANALYSES = {
    "landscape": lambda p: landscape(p, n=3),
    "top_eigs": lambda p: top_eigs(p, k=2, tol=0.1),
    "spectrum": lambda p: spectrum(p, steps=4, probes=1),
    "radius": lambda p: perturbation_curve(p, [0.1], directions=2, steps=1),
    "sharpness": lambda p: sharpness(p, steps=1),
    "average sharpness": lambda p: sharpness(p, case="average", draws=1),
}


@pytest.mark.parametrize("bn", ["eval", "batch", "recalibrate"])
@pytest.mark.parametrize("analysis", ANALYSES.values(), ids=ANALYSES)
def test_the_model_is_left_as_it_was_found(analysis, bn):
    model, data = settled_net("conv")
    model.train()
    model.body[1].eval()
    model.head.bias.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = copy.deepcopy(model)
    torch.manual_seed(5)
    random = torch.get_rng_state()

    analysis(Problem(model, F.cross_entropy, data, bn=bn))

    assert torch.equal(torch.get_rng_state(), random)
    pairs = zip(model.state_dict().items(), before.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(v, w) for (a, v), (b, w) in pairs)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad
        assert (p.grad is None) == (name != "head.weight")
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))


def test_uneven_batches_equal_one_batch():
    model, data = settled_net("conv")
    whole = Problem(model, F.cross_entropy, data)
    parts = Problem(model, F.cross_entropy, data, microbatch=5)
    plain = F.cross_entropy(model(data[0]), data[1]).item()
    with whole.replica() as one, parts.replica() as many:
        assert sorted(len(x) for x, _ in many.batches()) == [4, 4, 5]
        assert one.evaluate()[0] == pytest.approx(plain, rel=1e-13)
        assert many.evaluate()[0] == pytest.approx(plain, rel=1e-13)
        assert many.evaluate()[1] == one.evaluate()[1]
        for g, h in zip(one.gradient()[1], many.gradient()[1], strict=True):
            torch.testing.assert_close(g, h, rtol=0, atol=1e-13)
        a, b = (Hessian(replica).product(one.centre) for replica in (one, many))
        for g, h in zip(a, b, strict=True):
            torch.testing.assert_close(g, h, rtol=0, atol=1e-12)


@pytest.mark.parametrize("analysis", ANALYSES.values(), ids=ANALYSES)
def test_a_model_that_views_its_feature_maps_as_rows_is_analysed(analysis):
    class Views(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).view(len(x), -1))

    x, y = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    model = Views(nn.Conv2d(1, 2, 3, padding=1), nn.Linear(32, 3))
    problem = Problem(model, F.cross_entropy, (x, y))
    assert problem.value() == F.cross_entropy(model(x), y).item()
    analysis(problem)


def test_a_last_batch_of_one_does_not_break_batch_statistics():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    data = torch.randn(9, 2).double(), torch.zeros(9, dtype=torch.long)
    assert Problem(model, F.cross_entropy, data, bn="batch", microbatch=4).value() > 0


def test_each_bn_mode_uses_its_statistics():
    model, (x, y) = settled_net("conv")
    stored = Problem(model, F.cross_entropy, (x, y), bn="eval").value()
    assert stored == pytest.approx(F.cross_entropy(model.eval()(x), y).item(), rel=1e-13)
    batch = Problem(model, F.cross_entropy, (x, y), bn="batch").value()
    trained = copy.deepcopy(model).train()
    assert batch == pytest.approx(F.cross_entropy(trained(x), y).item(), rel=1e-13)
    # One micro-batch: the statistics of the subset are the batch's, but for n - 1 in the variance.
    for module in trained.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = 1.0
    trained(x)
    expected = F.cross_entropy(trained.eval()(x), y).item()
    recalibrated = Problem(model, F.cross_entropy, (x, y), bn="recalibrate").value()
    assert recalibrated == pytest.approx(expected, rel=1e-13)
    assert len({stored, batch, recalibrated}) == 3


def test_results_say_where_they_come_from():
    model, data = settled_net("conv")
    origin = top_eigs(Problem(model, F.cross_entropy, data, bn="batch"), tol=0.1).origin
    assert origin["samples"] == 13
    assert origin["bn"] == "batch"
    assert origin["parameters"] == sum(p.numel() for p in model.parameters())
    again = Problem(model, F.cross_entropy, data).describe()
    assert again["data_hash"] == origin["data_hash"]
    x, y = data
    assert Problem(model, F.cross_entropy, (x + 1, y)).describe()["data_hash"] != again["data_hash"]


def test_a_problem_reads_the_weights_the_model_has_then():
    problem = quadratic(rotated(torch.ones(4)))
    assert problem.value() == 0
    problem.model.w.data.fill_(1.0)
    assert problem.value() == pytest.approx(2.0)


def test_params_choose_a_layer():
    model, data = settled_net("conv")
    head = model.head
    by_pattern = Problem(model, F.cross_entropy, data, params=["head.*"])
    by_name = Problem(model, F.cross_entropy, data, params=iter(["head.bias", "head.weight"]))
    assert by_pattern.names == by_name.names == ("head.weight", "head.bias")
    assert by_pattern.size == head.weight.numel() + head.bias.numel()
    assert by_pattern.describe()["params"] == ["head.weight", "head.bias"]


def test_frozen_parameters_are_left_out_by_default():
    model, data = settled_net("conv")
    model.body.requires_grad_(False)
    assert Problem(model, F.cross_entropy, data).names == ("head.weight", "head.bias")
    model.head.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires gradients"):
        Problem(model, F.cross_entropy, data)
    assert len(Problem(model, F.cross_entropy, data, params=["*"]).names) == 9


def test_a_model_that_draws_random_numbers_is_one_function():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return (x * self.w) + torch.randn_like(x)

    data = torch.zeros(10, 3), torch.zeros(10, 3)
    problem = Problem(Noisy(), F.mse_loss, data, microbatch=4)
    assert problem.value() == problem.value()


BAD = {
    "lengths": (lambda m, x, y: Problem(m, F.cross_entropy, (x, y[1:])), "same number of samples"),
    "no pair": (lambda m, x, y: Problem(m, F.cross_entropy, x), "data must be a pair of tensors"),
    "misfit": (
        lambda m, x, y: Problem(m, F.cross_entropy, (x[:, :, 0], y)),
        r"do not fit: x of shape \(2, 1, 6\)",
    ),
    "classes": (lambda m, x, y: Problem(m, F.cross_entropy, (x, y + 9)), "do not fit"),
    "sum": (
        lambda m, x, y: Problem(m, nn.CrossEntropyLoss(reduction="sum"), (x, y)),
        "loss must be the mean over the samples, but giving each sample twice changed it",
    ),
    "none": (
        lambda m, x, y: Problem(m, nn.CrossEntropyLoss(reduction="none"), (x, y)),
        r"loss must give one number, the mean over the samples; got \(2,\)",
    ),
    "bn": (lambda m, x, y: Problem(m, F.cross_entropy, (x, y), bn="train"), "bn must be"),
    "params": (
        lambda m, x, y: Problem(m, F.cross_entropy, (x, y), params=["tail.*"]),
        "'tail.*' is no parameter of ConvNet. It has: body.0.weight, ",
    ),
    "microbatch": (
        lambda m, x, y: Problem(m, F.cross_entropy, (x, y), microbatch=0),
        "microbatch must be at least 1, got 0",
    ),
    "microbatch text": (
        lambda m, x, y: Problem(m, F.cross_entropy, (x, y), microbatch="4"),
        "microbatch must be a whole number, got '4'",
    ),
    "model": (
        lambda m, x, y: Problem(lambda: m, F.cross_entropy, (x, y)),
        r"model must be a torch\.nn\.Module, got function\. Call what makes it first",
    ),
    "loss name": (lambda m, x, y: Problem(m, "nll", (x, y)), "loss must be a function.*got str"),
    "loss class": (
        lambda m, x, y: Problem(m, nn.CrossEntropyLoss, (x, y)),
        "loss must be a function.*got the class CrossEntropyLoss",
    ),
    "params number": (
        lambda m, x, y: Problem(m, F.cross_entropy, (x, y), params=[0]),
        'params takes names or patterns such as "layer1.\\*"; got 0',
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_problems_raise_at_once(make, message):
    model, (x, y) = settled_net("conv")
    with pytest.raises((ValueError, TypeError), match=message):
        make(model, x, y)


@pytest.mark.parametrize(
    "analyse",
    [
        analysis.landscape,
        analysis.top_eigs,
        analysis.spectrum,
        lambda m: analysis.perturbation_curve(m, [0.1]),
        lambda m: analysis.sharpness(m, 0.1),
        analysis.robustness,
        lambda m: analysis.ensemble(m, ratio=0.1),
    ],
)
def test_analyses_ask_for_a_problem(analyse):
    with pytest.raises(TypeError, match=r"takes a Problem: Problem\(model, loss.*Got Linear"):
        analyse(nn.Linear(2, 2))
