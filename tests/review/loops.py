"""What the tests of hard loops share: a loss with weights of its own, and gradients by hand."""

import copy

import torch
from torch import nn

import steppe
from tests.nets import batch, loss_fn, mlp, weights_of


def data(step=0, size=12):
    return batch(step, size, dtype=torch.float64)


def net():
    return mlp(dtype=torch.float64)


def sgd(params, lr=0.1, **options):
    params = params.parameters() if isinstance(params, nn.Module) else params
    return torch.optim.SGD(params, lr=lr, **options)


def attached(method, *, lr=0.1, model=None, **options):
    model = model or net()
    optimizer = sgd(model, lr, momentum=0.9)
    return model, optimizer, steppe.attach(model, optimizer, method, **options)


class Weighted(nn.Module):
    """A loss that learns how much each class counts."""

    def __init__(self):
        super().__init__()
        self.log_weights = nn.Parameter(torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64))

    def forward(self, output, target):
        return (loss_fn(output, target, reduction="none") * self.log_weights.exp()[target]).mean()


class Watched:
    """A loss for `perturber.backward` that remembers where it was asked, and on what."""

    def __init__(self, model, loss):
        self.model, self.loss = model, loss
        self.twin = copy.deepcopy((model, loss))
        self.seen = []

    def __call__(self, x, y):
        self.seen.append((weights_of(self.model), x, y))
        return self.loss(self.model(x), y)

    def gradients(self, factors):
        """The sum of factor times gradient over what was asked, by a twin that steppe never saw."""
        model, loss = self.twin
        leaves = leaves_of(model, loss)
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for factor, (weights, x, y) in zip(factors, self.seen, strict=True):
            with torch.no_grad():
                for p, w in zip(model.parameters(), weights, strict=True):
                    p.copy_(w)
            for t, g in zip(total, torch.autograd.grad(loss(model(x), y), leaves), strict=True):
                t.add_(g, alpha=factor)
        return total


def leaves_of(*modules):
    return [p for m in modules if isinstance(m, nn.Module) for p in m.parameters()]


def grads_of(*modules):
    return [p.grad.clone() for p in leaves_of(*modules)]


def history_of(perturber):
    states = perturber.state_dict()["states"]
    return [t.detach().clone() for state in states for value in state.values() for t in value]


def train(model, optimizer, steps=3, accumulate=1, take_step=None):
    """An unchanged loop over micro-batches."""
    for step in range(steps):
        for part in range(accumulate):
            x, y = data(step * accumulate + part)
            (loss_fn(model(x), y) / accumulate).backward()
        (take_step or optimizer.step)()
        optimizer.zero_grad()


def step_with(perturber, model, optimizer, step):
    """One step of any method, on batches of its own."""
    parts = [data(10 * step + k) for k in range(perturber.batches_needed)]
    perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
    optimizer.step()
    optimizer.zero_grad()


def assert_close(found, wanted, rtol=1e-9, atol=1e-12):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
