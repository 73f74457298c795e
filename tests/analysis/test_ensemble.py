"""Predictions averaged over weight noise."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steppe
from steppe.analysis import Problem, ensemble

from .known import settled_net


def net_problem(kind="conv", **options):
    model, data = settled_net(kind)
    return Problem(model, F.cross_entropy, data, **options)


def test_no_noise_gives_the_single_model():
    result = ensemble(net_problem(), ratio=0.0, samples=3)
    assert result.single[0].item() == pytest.approx(net_problem().value(), rel=1e-6)
    for row in (*result.members, *result.averaged):
        torch.testing.assert_close(row, result.single)


def test_the_average_is_that_of_probabilities_under_perturbed():
    problem = net_problem()
    x, y = problem.data
    result = ensemble(problem, ratio=0.3, samples=3, seed=7)
    problem.model.to(memory_format=torch.channels_last)  # as analyses do
    true = [p.detach().clone() for p in problem.model.parameters()]
    found = []
    for number in (1, 2, 3):
        model = problem.model.eval()
        with steppe.perturbed(model, seed=(7 << 32) + number, ratio=0.3), torch.no_grad():
            found.append(model(x).double().softmax(1))
    assert all(torch.equal(a, b) for a, b in zip(true, problem.model.parameters(), strict=True))
    for count in (1, 2, 3):
        mean = torch.stack(found[:count]).mean(0)
        nll = -mean[range(len(y)), y].log().mean()
        right = (mean.argmax(1) == y).double().mean()
        torch.testing.assert_close(
            result.averaged[count - 1, :2], torch.stack([nll, right]), rtol=1e-5, atol=0
        )
    # Jensen: the average is at least as likely as its members are on average
    assert result.averaged[-1, 0] <= result.members[:, 0].mean()


def test_a_coin_under_noise_has_the_known_likelihood():
    """Logits (z, -z) with z ~ N(0, s): the mean probability is 1/2, and each member's is worse."""
    model = nn.Linear(1, 2, bias=False).double()
    model.weight.data = torch.tensor([[1e-9], [1e-9]]).double()
    wide = nn.Sequential(model, Scale(1e9))
    data = torch.ones(2, 1).double(), torch.tensor([0, 1])
    result = ensemble(Problem(wide, F.cross_entropy, data), ratio=1.0, samples=4000)
    # p = sigmoid(d), d ~ N(0, 2): by symmetry the mean is 1/2; its spread bounds the error
    assert result.averaged[-1, 0].item() == pytest.approx(math.log(2), abs=0.01)
    d = torch.linspace(-12, 12, 20001).double()
    expected = torch.trapezoid(F.softplus(d) * torch.exp(-(d**2) / 4) / (4 * math.pi) ** 0.5, d)
    assert result.members[:, 0].mean().item() == pytest.approx(expected.item(), abs=0.02)


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def test_only_weights_under_analysis_are_drawn_and_others_do_not_change_metrics():
    part = net_problem(params=["*bias"])
    result = ensemble(part, ratio=0.5, samples=2)
    assert (result.members[:, 0] - result.single[0]).abs().max() < ensemble(
        net_problem(), ratio=0.5, samples=2
    ).members[:, 0].sub(result.single[0]).abs().max()


def test_sequences_and_ignored_targets():
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, 7), torch.randint(3, (5, 7))
    y[0, 3:] = -100
    net = nn.Conv1d(4, 3, 1)
    result = ensemble(Problem(net, F.cross_entropy, (x, y), microbatch=5), ratio=0.2, samples=2)
    assert result.single[0].item() == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-6)


def test_a_nan_is_wrong_and_not_hidden():
    model, data = settled_net("conv")
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    result = ensemble(Problem(model, F.cross_entropy, data), samples=1)
    assert result.averaged[0, 0].isnan()
    assert result.averaged[0, 1] == 0


def test_table_and_cost():
    result = ensemble(net_problem(), ratio=0.2, samples=4)
    table = result.table()
    assert "average of 4 draws" in table
    assert str(result) == table
    assert "single model" in table
    assert min(result.seconds) > 0
    assert result.table("csv").count("\n") >= 3


def test_what_cannot_be_averaged_is_refused():
    x = torch.randn(6, 2)
    wrong = Problem(nn.Linear(2, 1), F.mse_loss, (x, x[:, :1]))
    with pytest.raises(ValueError, match="averages probabilities of classes"):
        ensemble(wrong)
    with pytest.raises(TypeError, match="ratio must be a number, got 'a'"):
        ensemble(net_problem(), ratio="a")
    with pytest.raises(ValueError, match="ratio must be finite and at least 0, got -1"):
        ensemble(net_problem(), ratio=-1)
    with pytest.raises(TypeError, match="seed must be an int, got 'a'"):
        ensemble(net_problem(), seed="a")
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        ensemble(net_problem(), samples=0)
    with pytest.raises(ValueError, match='bn="eval"'):
        ensemble(net_problem(bn="recalibrate"))
