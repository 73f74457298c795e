import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steppe.analysis import Problem, landscape
from steppe.analysis.directions import filter_normalised

from .known import settled_net


def least_squares(seed=0, scale=1.0):
    """Quadratic in its weights: `mean ‖x W' - y‖²`."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 3, bias=False).double()
    data = torch.randn(10, 4).double(), torch.randn(10, 3).double()
    return Problem(model, lambda out, y: scale * (out - y).square().sum(1).mean(), data)


def naive(problem, n, span, seeds):
    """The obvious twin: move the model itself, one batch, no tricks."""
    model, (x, y) = problem.model, problem.data
    start = [p.detach().clone() for p in model.parameters()]
    d1, d2 = (filter_normalised(start, seed) for seed in seeds)
    axis = torch.linspace(-span, span, n, dtype=torch.float64)
    loss, accuracy = torch.empty(n, n).double(), torch.empty(n, n).double()
    with torch.no_grad():
        for i, a in enumerate(axis):
            for j, b in enumerate(axis):
                for p, w, u, v in zip(model.parameters(), start, d1, d2, strict=True):
                    p.copy_(w + a.item() * u + b.item() * v)
                out = model(x)
                loss[i, j] = problem.loss(out, y).item()
                accuracy[i, j] = (out.argmax(1) == y).double().mean() if y.ndim == 1 else 0
        for p, w in zip(model.parameters(), start, strict=True):
            p.copy_(w)
    return loss, accuracy


def test_a_quadratic_is_exact_everywhere():
    problem = least_squares()
    result = landscape(problem, n=9, span=2.0, seeds=(3, 4))
    W = problem.model.weight.detach()
    x, y = problem.data
    d1, d2 = (filter_normalised([W], seed)[0] for seed in (3, 4))
    for i in range(9):
        for j in range(9):
            at = W + (i - 4) / 2 * d1 + (j - 4) / 2 * d2
            exact = (x @ at.T - y).square().sum(1).mean().item()
            assert result.loss[i, j].item() == pytest.approx(exact, rel=1e-13)
    assert result.accuracy is None
    assert result.a.tolist() == [(i - 4) / 2 for i in range(9)]


@pytest.mark.parametrize("bn", ["eval", "batch", "recalibrate"])
def test_the_centre_is_the_plain_loss(bn):
    model, data = settled_net("conv")
    problem = Problem(model, F.cross_entropy, data, bn=bn)
    result = landscape(problem, n=3)
    assert result.loss[1, 1].item() == pytest.approx(problem.value(), rel=1e-13)
    assert result.centre == pytest.approx(problem.value(), rel=1e-13)
    assert landscape(problem, n=4).centre == pytest.approx(problem.value(), rel=1e-13)


def test_rescaled_layers_show_the_same_surface():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 5, bias=False),
        nn.ReLU(),
        nn.Linear(5, 3, bias=False),
    ).double()
    data = torch.randn(20, 1, 6, 6).double(), torch.randint(3, (20,))
    before = landscape(Problem(net, F.cross_entropy, data), n=7)
    with torch.no_grad():
        for layer, scale in ((0, 10.0), (3, 0.05), (5, 2.0)):
            net[layer].weight.mul_(scale)
    after = landscape(Problem(net, F.cross_entropy, data), n=7)
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-12, atol=0)
    assert torch.equal(after.accuracy, before.accuracy)
    assert before.loss.std() > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_plane_equals_the_naive_loop(dtype):
    model, (x, y) = settled_net("conv", samples=21)
    model, x = model.to(dtype), x.to(dtype)
    problem = Problem(model, F.cross_entropy, (x, y), microbatch=8)
    ours = landscape(problem, n=7, span=1.0)
    loss, accuracy = naive(problem, 7, 1.0, (0, 1))
    rtol = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(ours.loss, loss, rtol=rtol, atol=0)
    if dtype == torch.float64:
        torch.testing.assert_close(ours.accuracy, accuracy)


def test_a_convolution_that_is_read_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)

        def forward(self, x):
            out = self.conv(x)
            return (self.norm(out) + out).mean((2, 3))

    torch.manual_seed(0)
    model = Twice().double().eval()
    model.norm.running_mean.fill_(0.5)
    data = torch.randn(8, 1, 5, 5).double(), torch.randint(3, (8,))
    problem = Problem(model, F.cross_entropy, data)
    loss, _ = naive(problem, 3, 1.0, (0, 1))
    torch.testing.assert_close(landscape(problem, n=3).loss, loss, rtol=1e-13, atol=0)


def test_a_shared_convolution():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)
            self.one, self.two = nn.BatchNorm2d(2), nn.BatchNorm2d(2)

        def forward(self, x):
            return self.two(self.conv(self.one(self.conv(x)))).mean((2, 3))

    torch.manual_seed(0)
    data = torch.randn(8, 2, 5, 5).double(), torch.randint(2, (8,))
    problem = Problem(Shared().double().eval(), F.cross_entropy, data)
    loss, _ = naive(problem, 3, 1.0, (0, 1))
    torch.testing.assert_close(landscape(problem, n=3).loss, loss, rtol=1e-13, atol=0)


def test_directions_leave_vectors_and_match_filter_norms():
    model, _ = settled_net("conv")
    weights = list(model.parameters())
    for w, d in zip(weights, filter_normalised(weights, seed=0), strict=True):
        if w.ndim < 2:
            assert torch.equal(d, torch.zeros_like(d))
        else:
            torch.testing.assert_close(d.flatten(1).norm(dim=1), w.flatten(1).norm(dim=1))


def test_what_is_not_finite_is_kept_and_counted():
    problem = least_squares()

    def fenced(out, y):
        loss = (out - y).square().sum(1).mean()
        return torch.where(loss > 10, float("nan"), loss)

    result = landscape(Problem(problem.model, fenced, problem.data), n=11, span=3.0)
    whole = landscape(problem, n=11, span=3.0)
    assert result.holes == int((whole.loss > 10).sum())
    assert 0 < result.holes < 121
    inside = whole.loss <= 10
    assert torch.equal(result.loss[inside], whole.loss[inside])


def test_a_model_of_one_output_has_no_accuracy():
    x = torch.randn(8, 3)
    loss = lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y.float())  # noqa: E731
    problem = Problem(nn.Linear(3, 1), loss, (x, (x[:, 0] > 0).long()))
    assert landscape(problem, n=3).accuracy is None


def bias_only():
    model, data = settled_net("conv")
    return Problem(model, F.cross_entropy, data, params=["head.bias"])


BAD = {
    "zero directions": (lambda: landscape(bias_only()), "A direction is zero"),
    "one point": (lambda: landscape(least_squares(), n=1), "n must be at least 2"),
    "span": (lambda: landscape(least_squares(), span=0.0), "span above 0"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
