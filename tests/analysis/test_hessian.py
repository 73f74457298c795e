import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steppe.analysis import Problem, top_eigs
from steppe.analysis.hessian import Hessian

from .known import full_hessian, settled_net


def columns(problem):
    with problem.replica() as replica:
        hessian = Hessian(replica)
        return torch.stack([hessian(e) for e in torch.eye(problem.size).double()])


@pytest.mark.parametrize("kind", ["conv", "attention"])
def test_products_equal_the_full_hessian(kind):
    model, data = settled_net(kind)
    problem = Problem(model, F.cross_entropy, data, microbatch=5)
    ours, exact = columns(problem), full_hessian(problem)
    rounding = 1e-11 * exact.abs().max().item()
    torch.testing.assert_close(ours, exact, rtol=0, atol=rounding)
    torch.testing.assert_close(ours, ours.T, rtol=0, atol=rounding)
    with problem.replica() as replica:
        # torch's softmax has no backward through its forward derivative: attention goes by auto.
        for mode in ("tangent" if kind == "conv" else "auto", "backward"):
            hessian = Hessian(replica, mode)
            for v in torch.randn(4, problem.size).double():
                torch.testing.assert_close(hessian(v), exact @ v, rtol=0, atol=10 * rounding)


def test_batch_statistics_are_differentiated_through():
    model, data = settled_net("conv")
    problem = Problem(model, F.cross_entropy, data, bn="batch")
    frozen = full_hessian(problem)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_var = None
            module.track_running_stats = False
    exact = full_hessian(problem)
    with Problem(model, F.cross_entropy, data, bn="batch").replica() as replica:
        for v in torch.randn(4, problem.size).double():
            for mode in ("auto", "backward"):
                product = Hessian(replica, mode)(v)
                rounding = 1e-11 * exact.abs().max().item() * v.norm().item()
                torch.testing.assert_close(product, exact @ v, rtol=0, atol=rounding)
        hessian = Hessian(replica)
        hessian(v)
        assert hessian.mode == "backward"  # the forward derivatives of batch statistics are wrong
    assert (exact - frozen).abs().max() > 0.01 * exact.abs().max()


def test_linear_softmax_has_its_closed_form():
    """H of cross-entropy in W is the mean of (diag(p) - p p') kron x x'."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).double()
    x, y = torch.randn(11, 4).double(), torch.randint(3, (11,))
    p = model(x).softmax(1).detach()
    exact = torch.zeros(12, 12).double()
    for xi, pi in zip(x, p, strict=True):
        exact += torch.kron(torch.diag(pi) - torch.outer(pi, pi), torch.outer(xi, xi)) / len(x)
    problem = Problem(model, F.cross_entropy, (x, y), microbatch=4)
    torch.testing.assert_close(columns(problem), exact, rtol=0, atol=1e-14)
    result = top_eigs(problem, k=3, tol=1e-10)
    expected = torch.linalg.eigvalsh(exact).flip(0)[:3]
    assert ((result.values - expected).abs() <= result.residuals).all()


def test_float32_products_are_summed_in_float64():
    model, (x, y) = settled_net("conv")
    exact = full_hessian(Problem(model, F.cross_entropy, (x, y)))
    single = Problem(model.float(), F.cross_entropy, (x.float(), y), microbatch=7)
    ours = columns(single)
    assert ours.dtype == torch.float64
    # A few hundred roundings of float32 on the way through the net and back twice.
    assert (ours - exact).abs().max() <= 300 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_a_layer_has_its_block():
    model, data = settled_net("conv")
    whole = full_hessian(Problem(model, F.cross_entropy, data))
    head = Problem(model, F.cross_entropy, data, params=["head.*"])
    block = columns(head)
    torch.testing.assert_close(block, whole[-head.size :, -head.size :], rtol=0, atol=1e-12)


def test_without_forward_derivatives_auto_goes_backward():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    class Custom(nn.Linear):
        def forward(self, x):
            return Square.apply(super().forward(x))

    torch.manual_seed(0)
    data = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    problem = Problem(Custom(3, 2).double(), F.mse_loss, data)
    v = torch.randn(8).double()
    with problem.replica() as replica:
        hessian = Hessian(replica)
        product = hessian(v)
        assert hessian.mode == "backward"
    torch.testing.assert_close(product, full_hessian(problem) @ v, rtol=0, atol=1e-13)
    with problem.replica() as replica, pytest.raises(RuntimeError, match="jvp"):
        Hessian(replica, "tangent")(v)


def test_parameters_without_curvature_give_zeros():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Parameter(torch.ones(3).double())
            self.unused = nn.Parameter(torch.ones(2).double())

        def forward(self, x):
            return x @ self.used

    data = torch.ones(4, 3).double(), torch.zeros(4)
    linear = Problem(Flat(), lambda out, y: out.mean(), data)
    assert torch.equal(columns(linear), torch.zeros(5, 5).double())
    curved = Problem(Flat(), lambda out, y: out.square().mean(), data)
    assert torch.equal(columns(curved)[3:], torch.zeros(2, 5).double())
    assert torch.equal(columns(curved)[:3, :3], torch.full((3, 3), 2.0).double())
