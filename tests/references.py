"""Each algorithm again, slow and obvious, written from the paper's formulas.

A reference takes the weights, the gradient function and the very noise that steppe drew (unit
normal values per parameter), and gives the gradient that the optimizer should see. Nothing here
uses steppe's own code.
"""

import torch


def filter_norm(w):
    """‖w_j‖ for each filter, shaped to broadcast."""
    if w.dim() < 2:
        return w.norm()
    return torch.stack([row.norm() for row in w]).view(-1, *[1] * (w.dim() - 1))


def filter_size(w):
    return w.numel() if w.dim() < 2 else w[0].numel()


def rwp_eps(weights, unit, sigma):
    return [sigma * filter_norm(w) * z for w, z in zip(weights, unit, strict=True)]


def ratio_eps(weights, unit, ratio):
    pairs = zip(weights, unit, strict=True)
    return [ratio / filter_size(w) ** 0.5 * filter_norm(w) * z for w, z in pairs]


def arwp_eps(weights, unit, history, sigma, eta, exponent):
    """variance sigma² ‖w_j‖² / (1 + eta v_j)^(2 exponent)"""
    return [
        e / (1 + eta * v) ** exponent
        for e, v in zip(rwp_eps(weights, unit, sigma), history, strict=True)
    ]


def elementwise_eps(unit, history, sigma, eta, exponent):
    return [sigma * z / (1 + eta * v) ** exponent for z, v in zip(unit, history, strict=True)]


def no_history(weights):
    return [torch.zeros_like(filter_norm(w)) for w in weights]


def next_history(history, grads, beta):
    """v_j <- beta v_j + ‖g_j‖²"""
    return [beta * v + filter_norm(g) ** 2 for v, g in zip(history, grads, strict=True)]


def next_elementwise_history(history, grads, beta):
    return [beta * v + g**2 for v, g in zip(history, grads, strict=True)]


def moved(weights, eps, sign=1.0):
    return [w + sign * e for w, e in zip(weights, eps, strict=True)]


def mix(parts):
    """The weighted sum of gradients: parts are (weight, gradients)."""
    return [
        sum(c * g for (c, _), g in zip(parts, gs, strict=True))
        for gs in zip(*[g for _, g in parts], strict=True)
    ]


def total_norm(tensors):
    return torch.sqrt(sum((t**2).sum() for t in tensors))


def sam_eps(grads, rho):
    norm = total_norm(grads)
    return [rho * g / norm for g in grads]


def asam_eps(weights, grads, rho, eta):
    """eps = rho T² g / ‖T g‖ with T = |w| + eta"""
    scaled = [(w.abs() + eta) * g for w, g in zip(weights, grads, strict=True)]
    norm = total_norm(scaled)
    return [rho * (w.abs() + eta) * s / norm for w, s in zip(weights, scaled, strict=True)]


def msam_eps(momentum, rho):
    norm = total_norm(momentum)
    return [-rho * v / norm if norm > 0 else torch.zeros_like(v) for v in momentum]
