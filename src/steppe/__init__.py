"""steppe: train PyTorch models into flat minima with random weight perturbation."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe import analysis as analysis
    from steppe import integrations as integrations
    from steppe import lab as lab
    from steppe import report as report
    from steppe import testing as testing
    from steppe import theory as theory
    from steppe.attaching import attach, perturbed
    from steppe.batchnorm import recompute_norm_stats
    from steppe.distributed import process_group
    from steppe.methods import (
        Method,
        Pass,
        antithetic_rwp,
        arwp,
        asam,
        flat_lora,
        lpf_sgd,
        m_arwp,
        m_rwp,
        mixed,
        msam,
        rwp,
        sam,
        sgd,
    )
    from steppe.perturbations import (
        AdaptiveGaussian,
        Ascent,
        Gaussian,
        MomentumAscent,
        Perturbation,
    )
    from steppe.perturber import Perturber
    from steppe.schedules import Schedule, constant, cosine_increase, linear
    from steppe.training import Probe

__version__ = "0.2.0"

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
    "flat_lora",
    "linear",
    "lpf_sgd",
    "m_arwp",
    "m_rwp",
    "mixed",
    "msam",
    "perturbed",
    "process_group",
    "recompute_norm_stats",
    "rwp",
    "sam",
    "sgd",
]

_MODULES = (
    "attaching",
    "batchnorm",
    "distributed",
    "methods",
    "perturbations",
    "perturber",
    "schedules",
)
"""Where the names of `__all__` are defined."""

_PACKAGES = ("analysis", "integrations", "lab", "report", "testing", "theory")
"""What an attribute imports: `steppe.analysis` needs no `import steppe.analysis`."""


def __getattr__(name: str) -> Any:
    """Public names and packages, imported when first used: `steppe --help` needs no torch."""
    if name in _PACKAGES:
        return importlib.import_module(f"steppe.{name}")
    if name in __all__:
        for module in _MODULES:
            found = vars(importlib.import_module(f"steppe.{module}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
    raise AttributeError(f"module 'steppe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])
