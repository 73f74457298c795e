import pytest
import torch
import torch.nn.functional as F

from steppe.analysis import Problem, top_eigs

from .known import full_hessian, quadratic, rotated, settled_net

N = 50


def bulk(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).double()


def with_top(*values):
    return torch.cat([torch.tensor(values).double(), bulk(N - len(values))])


SPECTRA = {
    "outliers": with_top(10, 8, 5, 3),
    "cluster": with_top(5, 4.99, 4.98, 4),
    "multiple": with_top(5, 5, 5, 4),
    "larger negative": with_top(-20, 5, 4, 3),
    "no gap": bulk(N, seed=1),
    "early breakdown": torch.cat([torch.tensor([2.0, 1.0]).double(), torch.zeros(N - 2)]),
    "two values": torch.cat([torch.full((N // 2,), 3.0), torch.full((N // 2,), -1.0)]).double(),
    "all negative": -1 - bulk(N),
    "zero": torch.zeros(N).double(),
}


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA)
def test_the_error_never_exceeds_the_residual(spectrum, dtype, scale):
    for seed in range(2):
        H = rotated(scale * spectrum, seed).to(dtype)
        exact = torch.linalg.eigvalsh(H.double())
        reference = N * torch.finfo(torch.float64).eps * exact.abs().max()  # eigvalsh rounds too
        for k, tol in ((1, 1e-3), (4, 1e-5)):
            result = top_eigs(quadratic(H), k, tol, seed=seed)
            assert result.converged
            top = exact.flip(0)[:k]
            assert ((result.values - top).abs() <= result.residuals + reference).all()
            floor = 50 * torch.finfo(dtype).eps * exact.abs().max()
            assert (result.residuals <= tol * result.values.abs() + floor).all()


def test_a_net_in_float32_has_the_eigenvalues_of_the_full_hessian():
    model, (x, y) = settled_net("conv")
    exact = torch.linalg.eigvalsh(full_hessian(Problem(model, F.cross_entropy, (x, y))))
    problem = Problem(model.float(), F.cross_entropy, (x.float(), y))
    result = top_eigs(problem, k=3, tol=1e-4)
    # The rounded weights have a slightly other Hessian, by a few float32 roundings.
    slack = 300 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((result.values - exact.flip(0)[:3]).abs() <= result.residuals + slack).all()


def test_all_eigenvalues_of_a_small_problem():
    H = rotated(torch.tensor([3.0, 3.0, 1.0, -2.0, 0.0]))
    result = top_eigs(quadratic(H), k=5, tol=1e-10)
    expected = torch.tensor([3.0, 3.0, 1.0, 0.0, -2.0]).double()
    torch.testing.assert_close(result.values, expected, rtol=0, atol=1e-13)


def test_far_fewer_products_than_weights():
    H = rotated(torch.cat([torch.tensor([50.0, 30, 20, 10]), 0.1 * bulk(496)]))
    assert top_eigs(quadratic(H), tol=1e-3).products <= 10


def test_stopping_early_warns_and_still_bounds_the_error():
    H = rotated(bulk(N))
    with pytest.warns(RuntimeWarning, match="stopped after max_steps=8"):
        result = top_eigs(quadratic(H), tol=1e-6, max_steps=8)
    assert not result.converged
    nearest = (torch.linalg.eigvalsh(H) - result.values).abs().min()
    assert nearest <= result.residuals[0]
    assert result.products == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 6}, "k must be at most the number of weights under analysis, 5; got k=6"),
        ({"k": 0}, "k must be at least 1, got k=0"),
        ({"tol": 0.0}, "tol must be above 0, got 0.0"),
        ({"k": 3, "max_steps": 2}, "max_steps=2 cannot give 3 eigenvalues"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        top_eigs(quadratic(rotated(torch.ones(5))), **options)


def test_a_loss_that_is_not_finite_is_named():
    problem = quadratic(torch.full((3, 3), float("nan")).double())
    with pytest.raises(ValueError, match="A Hessian product is not finite"):
        top_eigs(problem)
