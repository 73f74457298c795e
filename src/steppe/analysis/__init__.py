"""See the landscape (loss surfaces, Hessian spectra, radius curves, sharpness), what survives rounding,
pruning and noise, and what averaging over noise gains.

Every analysis takes a `Problem` and gives a frozen result that saves to `.npz` and loads back.
"""

try:
    import numpy as _numpy  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "steppe.analysis stores results with numpy, which is missing: pip install 'steppe[lab]'."
    ) from error

from steppe.analysis.changes import (
    Blur,
    Change,
    Contrast,
    InputNoise,
    Pruning,
    Rounding,
    TwoOfFour,
    WeightNoise,
)
from steppe.analysis.eigs import Eigenvalues, top_eigs
from steppe.analysis.ensemble import Ensemble, ensemble
from steppe.analysis.landscape import Landscape, landscape
from steppe.analysis.problem import Problem
from steppe.analysis.progress import Cost, estimate
from steppe.analysis.radius import RadiusCurve, perturbation_curve
from steppe.analysis.results import Result
from steppe.analysis.robustness import robustness
from steppe.analysis.robustness_result import Robustness
from steppe.analysis.sharpness import Sharpness, sharpness
from steppe.analysis.spectrum import Spectrum, spectrum

__all__ = [
    "Blur",
    "Change",
    "Contrast",
    "Cost",
    "Eigenvalues",
    "Ensemble",
    "InputNoise",
    "Landscape",
    "Problem",
    "Pruning",
    "RadiusCurve",
    "Result",
    "Robustness",
    "Rounding",
    "Sharpness",
    "Spectrum",
    "TwoOfFour",
    "WeightNoise",
    "ensemble",
    "estimate",
    "landscape",
    "perturbation_curve",
    "robustness",
    "sharpness",
    "spectrum",
    "top_eigs",
]
