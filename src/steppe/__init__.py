"""steppe: train PyTorch models into flat minima with random weight perturbation."""

from steppe.ascents import Ascent, MomentumAscent
from steppe.attaching import attach
from steppe.batchnorm import recompute_norm_stats
from steppe.methods import (
    Method,
    Pass,
    antithetic_rwp,
    arwp,
    asam,
    lpf_sgd,
    m_arwp,
    m_rwp,
    mixed,
    msam,
    rwp,
    sam,
    sgd,
)
from steppe.parallel import process_group
from steppe.perturbations import AdaptiveGaussian, Gaussian, Perturbation
from steppe.perturber import Perturber, Probe
from steppe.schedules import Schedule, constant, cosine_increase, linear

__version__ = "0.1.0"

__all__ = [
    "AdaptiveGaussian",
    "Ascent",
    "Gaussian",
    "Method",
    "MomentumAscent",
    "Pass",
    "Perturbation",
    "Perturber",
    "Probe",
    "Schedule",
    "antithetic_rwp",
    "arwp",
    "asam",
    "attach",
    "constant",
    "cosine_increase",
    "linear",
    "lpf_sgd",
    "m_arwp",
    "m_rwp",
    "mixed",
    "msam",
    "process_group",
    "recompute_norm_stats",
    "rwp",
    "sam",
    "sgd",
]
