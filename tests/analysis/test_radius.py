import pytest
import torch
import torch.nn.functional as F

from steppe.analysis import Problem, perturbation_curve

from .known import quadratic, rotated, settled_net

EIGENVALUES = torch.tensor([8.0, 3.0, 2.0, 1.0, 0.5, 0.2, 0.1, -0.3], dtype=torch.float64)
AT = torch.linspace(-1, 2, 8).double()
RADII = [0.01, 0.1, 1.0, 10.0]


def test_random_on_a_quadratic_is_the_trace():
    """With as many orthonormal directions as weights, the mean is the trace exactly."""
    problem = quadratic(rotated(EIGENVALUES), AT)
    curve = perturbation_curve(problem, RADII, kinds=["random"], directions=8)
    r = torch.tensor(RADII, dtype=torch.float64)
    expected = problem.value() + r.square() * EIGENVALUES.sum() / (2 * 8)
    torch.testing.assert_close(curve.loss[0], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(curve.theory[0], expected, rtol=1e-12, atol=0)
    assert curve.base == problem.value()


def test_fewer_directions_lie_within_their_error_bars():
    problem = quadratic(rotated(EIGENVALUES), AT)
    misses = 0
    for seed in range(40):
        curve = perturbation_curve(problem, [2.0], kinds=["random"], directions=4, seed=10 * seed)
        expected = problem.value() + 4 * EIGENVALUES.sum().item() / 16
        misses += abs(curve.loss[0, 0].item() - expected) > 3.18 * curve.error[0, 0].item()
    # 3.18 is Student's t for 3 degrees of freedom at 5 %; orthogonal directions do better.
    assert misses <= 6


def test_sam_on_a_quadratic_is_its_expansion():
    H = rotated(EIGENVALUES)
    problem = quadratic(H, AT)
    curve = perturbation_curve(problem, RADII, kinds=["sam"])
    g = H @ AT
    v = g / g.norm()
    r = torch.tensor(RADII, dtype=torch.float64)
    expected = problem.value() + r * g.norm() + r.square() / 2 * (v @ H @ v)
    torch.testing.assert_close(curve.loss[0], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(curve.theory[0], expected, rtol=1e-12, atol=0)
    assert curve.error.isnan().all()


def test_pgd_climbs_to_the_largest_eigenvalue():
    """At the minimum the gradient is zero and the worst direction is the top eigenvector."""
    problem = quadratic(rotated(EIGENVALUES))
    curve = perturbation_curve(problem, [0.1, 1.0], kinds=["pgd"], steps=100)
    torch.testing.assert_close(
        curve.loss[0], torch.tensor([0.04, 4.0], dtype=torch.float64), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("bn", ["eval", "batch", "recalibrate"])
def test_order_of_the_curves_on_a_net(bn):
    model, data = settled_net("conv", samples=40)
    problem = Problem(model, F.cross_entropy, data, bn=bn)
    curve = perturbation_curve(problem, [0.01, 0.05, 0.2], batch=20, directions=6, steps=4)
    random, sam, pgd = curve.loss
    assert (random <= sam + 3 * curve.error[0]).all()
    assert (pgd >= sam).all()
    assert (sam > curve.base).all()
    assert (curve.error[:2] > 0).all()


def test_smaller_batches_lie_farther_apart():
    model, data = settled_net("conv", samples=40)
    problem = Problem(model, F.cross_entropy, data)
    large, small = (
        perturbation_curve(problem, [0.1], kinds=["sam"], batch=size).loss for size in (40, 5)
    )
    assert small > large + 0.01


def test_uneven_batches_weigh_by_their_samples():
    model, (x, y) = settled_net("attention", samples=13)
    curve = perturbation_curve(Problem(model, F.cross_entropy, (x, y)), [0.3], ["sam"], batch=8)
    total = 0.0
    for part in (slice(0, 8), slice(8, 13)):
        one = Problem(model, F.cross_entropy, (x[part], y[part]))
        total += len(x[part]) * perturbation_curve(one, [0.3], ["sam"]).loss.item()
    assert curve.loss.item() == pytest.approx(total / 13, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radii": []}, "radii must be finite numbers"),
        ({"radii": [-1.0]}, "radii must be finite numbers"),
        ({"kinds": ["noise"]}, "kinds must be some of"),
        ({"kinds": "random"}, "kinds must be some of"),
        ({"batch": 0}, "batch and steps must be at least 1"),
        ({"directions": 9}, "between 1 and the number of weights, 8"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        perturbation_curve(quadratic(rotated(EIGENVALUES)), **{"radii": [1.0], **options})


def test_radii_of_equal_rise_on_a_quadratic():
    """At its minimum the loss rises by r² tr(H)/2d in random directions."""
    problem = quadratic(rotated(EIGENVALUES.abs()), torch.zeros(8).double())
    radii = [0.01, 0.1, 1.0, 10.0]
    curve = perturbation_curve(problem, radii, kinds=["random"], directions=8)
    expected = (2 * 8 * 0.05 / EIGENVALUES.abs().sum()).sqrt()
    assert curve.radii_at(0.05).item() == pytest.approx(expected.item(), rel=1e-9)
    assert curve.radii_at(1e6).isinf().all()
    with pytest.raises(ValueError, match="rise must be above 0"):
        curve.radii_at(0.0)


def test_an_adversarial_perturbation_raises_the_loss_at_a_smaller_radius():
    problem = quadratic(rotated(EIGENVALUES), AT)
    curve = perturbation_curve(problem, torch.logspace(-3, 1, 30).tolist(), ["random", "sam"])
    random, sam = curve.radii_at(0.1).tolist()
    assert sam < random / 3
