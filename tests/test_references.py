"""Every method against its slow twin, several steps in float64, equal to rounding."""

import pytest
import torch
from torch import nn

import steppe
from steppe.noise import Draw
from tests import references as ref

SIGMA, ETA, BETA, LR = 0.03, 5.0, 0.9, 0.1


class Twin:
    """A small conv net trained by steppe and, beside it, its weights as plain tensors."""

    def __init__(self, method, seed=3):
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3), nn.LayerNorm(3)
        ).double()
        self.method, self.seed = method, seed
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LR, momentum=0.9)
        self.perturber = steppe.attach(self.net, self.optimizer, method, seed=seed)
        self.names = [name for name, _ in self.net.named_parameters()]
        self.weights = [p.detach().clone() for p in self.net.parameters()]
        self.velocity = [torch.zeros_like(w) for w in self.weights]

    def batch(self, step, part=0):
        generator = torch.Generator().manual_seed(100 * step + part)
        x = torch.randn(12, 2, 4, 4, generator=generator, dtype=torch.float64)
        return x, torch.randn(12, 3, generator=generator, dtype=torch.float64)

    def loss_of(self, x, y):
        return (self.net(x) - y).square().mean()

    def gradient(self, weights, batch):
        """At any weights, through a functional call that steppe's hooks never see."""
        weights = [w.clone().requires_grad_() for w in weights]
        named = dict(zip(self.names, weights, strict=True))
        x, y = batch
        plain = nn.Sequential(*self.net)  # a container without hooks
        loss = (torch.func.functional_call(plain, named, (x,)) - y).square().mean()
        return [g.detach() for g in torch.autograd.grad(loss, weights)]

    def unit_noise(self, step, stream):
        """The unit normal values that steppe draws for a pass."""
        weights = self.perturber._training.weights
        true = [p.values.clone() for p in weights.params]
        weights.save()
        weights.add_noise(Draw(self.seed, step, stream), torch.ones_like(weights.sizes))
        unit = [p.values - t for p, t in zip(weights.params, true, strict=True)]
        weights.restore()
        return unit

    def update(self, grads):
        for w, v, g in zip(self.weights, self.velocity, grads, strict=True):
            v.mul_(0.9).add_(g)
            w.sub_(LR * v)

    def run(self, steps, expected_gradient):
        for step in range(steps):
            batches = [self.batch(step, k) for k in range(self.method.batches_needed)]
            grads = expected_gradient(step, *batches)
            self.perturber.backward(self.loss_of, *batches)
            for param, grad in zip(self.net.parameters(), grads, strict=True):
                torch.testing.assert_close(param.grad, grad, rtol=1e-9, atol=1e-12)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.update(grads)
            for param, weight in zip(self.net.parameters(), self.weights, strict=True):
                torch.testing.assert_close(param.detach(), weight, rtol=1e-9, atol=1e-12)


def test_rwp():
    twin = Twin(steppe.rwp(SIGMA))
    twin.run(
        4,
        lambda t, b: twin.gradient(
            ref.moved(twin.weights, ref.rwp_eps(twin.weights, twin.unit_noise(t, 0), SIGMA)), b
        ),
    )


def test_rwp_by_ratio_and_with_a_schedule():
    schedule = steppe.linear(0.1, 0.5, steps=3)
    twin = Twin(steppe.rwp(ratio=schedule))

    def gradient(t, b):
        eps = ref.ratio_eps(twin.weights, twin.unit_noise(t, 0), 0.1 + 0.4 * t / 3)
        return twin.gradient(ref.moved(twin.weights, eps), b)

    twin.run(4, gradient)


def test_isotropic_rwp():
    twin = Twin(steppe.rwp(SIGMA, isotropic=True))

    def gradient(t, b):
        eps = [SIGMA * z for z in twin.unit_noise(t, 0)]
        return twin.gradient(ref.moved(twin.weights, eps), b)

    twin.run(3, gradient)


@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_arwp(exponent):
    twin = Twin(steppe.arwp(SIGMA, eta=ETA, beta=BETA, exponent=exponent))
    history = ref.no_history(twin.weights)

    def gradient(t, b):
        nonlocal history
        eps = ref.arwp_eps(twin.weights, twin.unit_noise(t, 0), history, SIGMA, ETA, exponent)
        grads = twin.gradient(ref.moved(twin.weights, eps), b)
        history = ref.next_history(history, grads, BETA)
        return grads

    twin.run(5, gradient)


def test_elementwise_arwp():
    twin = Twin(steppe.arwp(SIGMA, eta=ETA, beta=BETA, elementwise=True))
    history = [torch.zeros_like(w) for w in twin.weights]

    def gradient(t, b):
        nonlocal history
        eps = ref.elementwise_eps(twin.unit_noise(t, 0), history, SIGMA, ETA, 0.25)
        grads = twin.gradient(ref.moved(twin.weights, eps), b)
        history = ref.next_elementwise_history(history, grads, BETA)
        return grads

    twin.run(5, gradient)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.5, 1.0])
def test_m_rwp(lam):
    twin = Twin(steppe.m_rwp(SIGMA, lam=lam))

    def gradient(t, clean, noisy):
        eps = ref.rwp_eps(twin.weights, twin.unit_noise(t, 1), SIGMA)
        perturbed = twin.gradient(ref.moved(twin.weights, eps), noisy)
        return ref.mix([(lam, perturbed), (1 - lam, twin.gradient(twin.weights, clean))])

    twin.run(4, gradient)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("same_batch", [False, True])
def test_m_arwp_learns_from_its_perturbed_gradient_alone(lam, same_batch):
    twin = Twin(steppe.m_arwp(SIGMA, eta=ETA, beta=BETA, lam=lam, same_batch=same_batch))
    history = ref.no_history(twin.weights)

    def gradient(t, clean, noisy=None):
        nonlocal history
        noisy = clean if same_batch else noisy
        eps = ref.arwp_eps(twin.weights, twin.unit_noise(t, 1), history, SIGMA, ETA, 0.25)
        perturbed = twin.gradient(ref.moved(twin.weights, eps), noisy)
        history = ref.next_history(history, perturbed, BETA)
        return ref.mix([(lam, perturbed), (1 - lam, twin.gradient(twin.weights, clean))])

    twin.run(5, gradient)


def test_m_arwp_elementwise():
    twin = Twin(steppe.m_arwp(SIGMA, eta=ETA, beta=BETA, lam=0.3, elementwise=True))
    history = [torch.zeros_like(w) for w in twin.weights]

    def gradient(t, clean, noisy):
        nonlocal history
        eps = ref.elementwise_eps(twin.unit_noise(t, 1), history, SIGMA, ETA, 0.25)
        perturbed = twin.gradient(ref.moved(twin.weights, eps), noisy)
        history = ref.next_elementwise_history(history, perturbed, BETA)
        return ref.mix([(0.3, perturbed), (0.7, twin.gradient(twin.weights, clean))])

    twin.run(5, gradient)


def test_sam_and_its_batches():
    twin = Twin(steppe.sam(0.2))

    def gradient(t, b):
        eps = ref.sam_eps(twin.gradient(twin.weights, b), 0.2)
        return twin.gradient(ref.moved(twin.weights, eps), b)

    twin.run(4, gradient)


def test_sam_with_different_batches():
    twin = Twin(steppe.sam(0.2, same_batch=False))

    def gradient(t, up, down):
        eps = ref.sam_eps(twin.gradient(twin.weights, up), 0.2)
        return twin.gradient(ref.moved(twin.weights, eps), down)

    twin.run(4, gradient)


def test_sam_with_m_sharpness_weighs_uneven_parts_by_size():
    twin = Twin(steppe.sam(0.2, m=5))

    def gradient(t, batch):
        x, y = batch
        parts = []
        for start in (0, 5, 10):
            part = (x[start : start + 5], y[start : start + 5])
            eps = ref.sam_eps(twin.gradient(twin.weights, part), 0.2)
            share = len(part[0]) / len(x)
            parts.append((share, twin.gradient(ref.moved(twin.weights, eps), part)))
        return ref.mix(parts)

    twin.run(3, gradient)


def test_asam():
    twin = Twin(steppe.asam(0.5, eta=0.01))

    def gradient(t, b):
        eps = ref.asam_eps(twin.weights, twin.gradient(twin.weights, b), 0.5, 0.01)
        return twin.gradient(ref.moved(twin.weights, eps), b)

    twin.run(4, gradient)


def test_lpf_sgd_takes_a_fresh_eps_for_each_slice():
    twin = Twin(steppe.lpf_sgd(SIGMA, samples=5))

    def gradient(t, batch):
        x, y = batch
        parts = []
        for k in range(5):
            rows = slice(k * 12 // 5, (k + 1) * 12 // 5)
            eps = ref.rwp_eps(twin.weights, twin.unit_noise(t, k), SIGMA)
            part = twin.gradient(ref.moved(twin.weights, eps), (x[rows], y[rows]))
            parts.append((len(x[rows]) / 12, part))
        return ref.mix(parts)

    twin.run(3, gradient)


def test_antithetic_rwp():
    twin = Twin(steppe.antithetic_rwp(SIGMA))

    def gradient(t, b):
        eps = ref.rwp_eps(twin.weights, twin.unit_noise(t, 0), SIGMA)
        up = twin.gradient(ref.moved(twin.weights, eps), b)
        down = twin.gradient(ref.moved(twin.weights, eps, -1.0), b)
        return ref.mix([(0.5, up), (0.5, down)])

    twin.run(3, gradient)


def test_msam():
    twin = Twin(steppe.msam(0.7, momentum=0.8))
    momentum = [torch.zeros_like(w) for w in twin.weights]

    def gradient(t, b):
        nonlocal momentum
        eps = ref.msam_eps(momentum, 0.7)
        grads = twin.gradient(ref.moved(twin.weights, eps), b)
        momentum = [0.8 * v + g for v, g in zip(momentum, grads, strict=True)]
        return grads

    twin.run(5, gradient)


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_and_asam_equal_those_of_pytorch_optimizer(adaptive):
    peer = pytest.importorskip("pytorch_optimizer")
    method = steppe.asam(0.3, eta=0.0) if adaptive else steppe.sam(0.3)
    twin, other = Twin(method), Twin(steppe.sgd())
    theirs = peer.SAM(
        other.net.parameters(), torch.optim.SGD, rho=0.3, adaptive=adaptive, lr=LR, momentum=0.9
    )
    for step in range(5):
        batch = twin.batch(step)
        twin.perturber.backward(twin.loss_of, batch)
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        other.loss_of(*batch).backward()
        theirs.first_step(zero_grad=True)
        other.loss_of(*batch).backward()
        theirs.second_step(zero_grad=True)
    for ours, peers in zip(twin.net.parameters(), other.net.parameters(), strict=True):
        # theirs takes the norm of the gradient in float32, whatever the weights
        torch.testing.assert_close(ours, peers, rtol=1e-5, atol=1e-6)
