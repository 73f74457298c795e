"""steppe: train PyTorch models into flat minima with random weight perturbation."""

from steppe.schedules import Schedule, constant, cosine_increase, linear

__version__ = "0.1.0"

__all__ = ["Schedule", "constant", "cosine_increase", "linear"]
