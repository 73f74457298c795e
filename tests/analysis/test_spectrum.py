import pytest
import torch
import torch.nn.functional as F

from steppe.analysis import Problem, spectrum

from .known import full_hessian, quadratic, rotated, settled_net

N = 200


def noise(count):
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).double()


SPECTRA = {
    # A few outliers, a bulk around zero: what trained nets look like.
    "net-like": torch.cat([torch.tensor([50.0, 30, 20, 16, 12, 8]).double(), 0.3 * noise(N - 6)]),
    "null space": torch.cat([torch.tensor([5.0, 3.0]).double(), noise(48) ** 2, torch.zeros(150)]),
    "negative": torch.cat([torch.tensor([-9.0, 4.0]).double(), noise(N - 2)]),
}


def wasserstein(result, exact):
    """The area between the two distribution functions."""
    points = torch.cat([result.nodes, exact])
    mass = torch.cat([result.weights, torch.full_like(exact, -1 / len(exact))])
    order = points.argsort()
    gaps = points[order].diff()
    return (mass[order].cumsum(0)[:-1].abs() * gaps).sum().item()


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("eigenvalues", SPECTRA.values(), ids=SPECTRA)
def test_density_trace_and_ends(eigenvalues, scale):
    exact = scale * eigenvalues
    result = spectrum(quadratic(rotated(exact)), steps=40, probes=4)
    assert result.weights.sum().item() == pytest.approx(1, abs=1e-12)
    assert (result.weights >= 0).all()
    area = torch.trapezoid(result.density, result.grid).item()
    assert area == pytest.approx(1, abs=1e-7)
    # Weights of the bulk are averages of squared normals: their distribution function is off by
    # about 1/sqrt(2 N probes) over the width of the bulk, here at most 6 standard deviations.
    bulk = exact[(exact - exact.median()).abs() < 4 * scale]
    width = (bulk.max() - bulk.min()).item()
    assert wasserstein(result, exact) < width * 3 / (2 * N * 4) ** 0.5
    assert abs(result.trace - exact.sum().item()) < 4 * result.trace_error
    bulk_noise = (2 * bulk.square().sum() / 4).sqrt().item()
    assert result.trace_error < 2 * bulk_noise
    assert result.largest == pytest.approx(exact.max().item(), abs=result.largest_residual + 1e-12)
    low = exact.min().item()
    assert result.smallest == pytest.approx(low, abs=result.smallest_residual + 1e-9 * scale)


def test_known_weights_cut_the_error_of_the_trace():
    """Ten outliers carry the trace: their raw weights are noise, their true ones are 1/n."""
    exact = SPECTRA["net-like"]
    trace = exact.sum().item()
    raw, ours = [], []
    for seed in range(8):
        result = spectrum(quadratic(rotated(exact)), steps=30, probes=1, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        v = torch.randn(N, generator=generator).double()
        raw.append(N * (v.square() * exact).sum().item() / v.square().sum().item() - trace)
        ours.append(result.trace - trace)
    raw_error, our_error = (torch.tensor(e).square().mean().sqrt() / trace for e in (raw, ours))
    assert raw_error > 0.15
    assert our_error < 0.06


def test_a_null_space_is_not_taken_for_one_eigenvalue():
    exact = torch.cat([torch.tensor([2.0, 1.0]), torch.zeros(98)]).double()
    result = spectrum(quadratic(rotated(exact)), steps=20, probes=2)
    at_zero = result.weights[result.nodes.abs() < 1e-9].sum().item()
    assert at_zero == pytest.approx(0.98, abs=1e-9)
    assert result.trace == pytest.approx(3.0, rel=1e-9)


@pytest.mark.parametrize("kind", ["conv", "attention"])
def test_as_many_steps_as_weights_give_every_eigenvalue(kind):
    model, data = settled_net(kind)
    problem = Problem(model, F.cross_entropy, data, params=["*.weight"])
    exact = torch.linalg.eigvalsh(full_hessian(problem))
    result = spectrum(problem, steps=problem.size, probes=1)
    assert result.largest == pytest.approx(exact[-1].item(), rel=1e-9)
    assert result.smallest == pytest.approx(exact[0].item(), rel=1e-6)
    assert abs(result.trace - exact.sum().item()) <= 4 * result.trace_error + 1e-9
    assert wasserstein(result, exact) < 0.1 * (exact[-1] - exact[0]).item()


def test_the_kernel_follows_the_range_and_never_falls_below_two_grid_steps():
    H = rotated(SPECTRA["net-like"])
    wide = spectrum(quadratic(H), steps=10, probes=1, width=0.05)
    span = (wide.nodes.max() - wide.nodes.min()).item()
    assert wide.width == pytest.approx(0.05 * span)
    thin = spectrum(quadratic(H), steps=10, probes=1, width=1e-9, points=100)
    step = (thin.grid[1] - thin.grid[0]).item()
    assert thin.width == pytest.approx(2 * step, rel=0.3)
    assert thin.width >= 2 * step * (1 - 1e-9)
    small = spectrum(quadratic(1e-6 * H), steps=10, probes=1, width=0.05)
    torch.testing.assert_close(small.density, wide.density * 1e6, rtol=1e-6, atol=1e-3)


def test_a_flat_loss_has_its_mass_at_zero():
    result = spectrum(quadratic(torch.zeros(6, 6).double()))
    assert result.nodes.tolist() == [0.0, 0.0]
    assert torch.trapezoid(result.density, result.grid).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ["steps", "probes"])
def test_bad_counts_are_named(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        spectrum(quadratic(rotated(torch.ones(5))), **{name: 0})
