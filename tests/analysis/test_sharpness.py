import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steppe.analysis import Problem, sharpness

from .known import quadratic, rotated, settled_net

EIGENVALUES = torch.tensor([8.0, 3.0, 2.0, 1.0, 0.5, 0.2], dtype=torch.float64)


def test_worst_case_at_a_minimum_is_the_largest_eigenvalue():
    problem = quadratic(rotated(EIGENVALUES))
    result = sharpness(problem, rho=0.2, steps=100)
    assert result.value == pytest.approx(0.5 * 0.04 * 8, rel=1e-9)


def test_average_case_at_a_minimum_is_the_trace():
    problem = quadratic(rotated(EIGENVALUES))
    result = sharpness(problem, rho=0.2, case="average", draws=400)
    expected = 0.04 * EIGENVALUES.sum().item() / (2 * 6)
    # Standard error of a quadratic form in normals: sqrt(2 sum of squares / draws).
    exact_error = 0.04 / 12 * (2 * EIGENVALUES.square().sum() / 400).sqrt().item()
    assert abs(result.value - expected) < 4 * exact_error
    assert result.error == pytest.approx(exact_error, rel=0.3)


def test_adaptive_worst_case_scales_by_the_weights():
    """In u = eps / |w| the Hessian is diag(w) H diag(w)."""
    H = rotated(EIGENVALUES)
    w = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5, -1.0]).double()

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(w.clone())

        def forward(self, x):
            off = self.w - w
            return (0.5 * off @ H @ off).expand(len(x))

    data = torch.zeros(2, 1).double(), torch.zeros(2)
    problem = Problem(Shifted(), lambda out, y: out.mean(), data)
    scaled = torch.linalg.eigvalsh(torch.diag(w) @ H @ torch.diag(w))[-1].item()
    result = sharpness(problem, rho=0.1, adaptive=True, steps=200)
    assert result.value == pytest.approx(0.5 * 0.01 * scaled, rel=1e-8)
    average = sharpness(problem, rho=0.1, case="average", adaptive=True, draws=400)
    trace = (torch.diag(w) @ H @ torch.diag(w)).trace().item()
    assert abs(average.value - 0.01 * trace / 12) < 4 * average.error


def test_adaptive_sharpness_survives_a_rescaling_and_plain_does_not():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)
    ).double()
    data = torch.randn(30, 4).double(), torch.randint(3, (30,))
    problem = Problem(net, F.cross_entropy, data)
    cases = [(case, adaptive) for case in ("worst", "average") for adaptive in (True, False)]
    before = [sharpness(problem, 0.1, case, adaptive=adaptive).value for case, adaptive in cases]
    with torch.no_grad():
        net[0].weight.mul_(20)
        net[2].weight.div_(20)
    after = [sharpness(problem, 0.1, case, adaptive=adaptive).value for case, adaptive in cases]
    for (_, adaptive), a, b in zip(cases, before, after, strict=True):
        assert (abs(a - b) <= 1e-9 * abs(a)) == adaptive


def test_m_splits_the_samples_and_smaller_parts_are_sharper():
    model, data = settled_net("conv", samples=30)
    problem = Problem(model, F.cross_entropy, data)
    whole, parts = (sharpness(problem, 0.1, m=m) for m in (30, 4))
    assert len(whole.rises) == 1
    assert len(parts.rises) == 8
    assert parts.value > whole.value > 0
    one_step = sharpness(problem, 0.1, m=30, steps=0)
    assert one_step.value <= whole.value
    assert sharpness(problem, 0.1, "average", m=30).value < whole.value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": -1.0}, "rho must be finite and at least 0"),
        ({"case": "best"}, 'case must be "average" or "worst"'),
        ({"m": 0}, "m and draws must be at least 1"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        sharpness(quadratic(rotated(EIGENVALUES)), **options)
