"""What random perturbation does on functions whose answer is known."""

import math

import torch
from torch import nn

import steppe
from steppe.noise import Draw


class Quadratic(nn.Module):
    """w H w / 2 for a symmetric positive H."""

    def __init__(self, size=12):
        super().__init__()
        torch.manual_seed(0)
        a = torch.randn(size, size, dtype=torch.float64)
        self.H = a @ a.t() / size
        self.w = nn.Parameter(torch.randn(size, dtype=torch.float64))

    def forward(self):
        return self.w @ self.H @ self.w / 2


def test_on_a_quadratic_the_mean_gradient_is_clean_and_the_loss_grows_by_half_the_trace():
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.1))
    engine = perturber._training
    std = 0.1 * model.w.detach().norm()
    clean_gradient = model.H @ model.w.detach()
    clean = float(model.w.detach() @ model.H @ model.w.detach() / 2)
    losses, gradients = [], []
    for step in range(4000):
        engine.move(0, Draw(0, step))
        w = model.w.detach()
        losses.append(float(w @ model.H @ w / 2))
        gradients.append(model.H @ w)
        engine.restore()
    losses, gradients = torch.tensor(losses), torch.stack(gradients)
    error = gradients.std(0) / math.sqrt(len(gradients))
    assert ((gradients.mean(0) - clean_gradient).abs() < 5 * error).all()
    growth, error = losses.mean() - clean, losses.std() / math.sqrt(len(losses))
    expected = 0.5 * torch.trace(model.H) * std**2
    assert abs(growth - expected) < 5 * error
    assert error < 0.05 * expected, "too few draws for the test to mean anything"


class TwoMinima(nn.Module):
    """A sharp minimum at -1 that is a little deeper, a flat one at 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))

    def forward(self):
        sharp = 1.1 * torch.exp(-((self.w + 1) ** 2) / 0.02)
        flat = torch.exp(-((self.w - 1) ** 2) / 0.5)
        return -(sharp + flat)


def test_rwp_leaves_a_sharp_minimum_for_a_flat_one_and_sgd_does_not():
    ends = {}
    for name, method in {
        "sgd": steppe.sgd(),
        "rwp": steppe.rwp(0.5, isotropic=True),
    }.items():
        model = TwoMinima()
        with torch.no_grad():
            model.w.fill_(-0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        steppe.attach(model, optimizer, method)
        for _ in range(2000):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[name] = model.w.item()
    assert abs(ends["sgd"] + 1) < 0.05
    assert abs(ends["rwp"] - 1) < 0.3
