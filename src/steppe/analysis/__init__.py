"""See the landscape: loss surfaces, Hessian spectra, radius curves and sharpness.

Every analysis takes a `Problem` and gives a frozen result that saves to `.npz` and loads back.
"""

try:
    import numpy as _numpy  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "steppe.analysis stores results with numpy, which is missing: pip install 'steppe[lab]'."
    ) from error

from steppe.analysis.eigs import Eigenvalues, top_eigs
from steppe.analysis.landscape import Landscape, Line, interpolate, landscape
from steppe.analysis.problem import Problem
from steppe.analysis.progress import Cost, estimate
from steppe.analysis.radius import RadiusCurve, perturbation_curve
from steppe.analysis.results import Result
from steppe.analysis.sharpness import Sharpness, sharpness
from steppe.analysis.spectrum import Spectrum, spectrum

__all__ = [
    "Cost",
    "Eigenvalues",
    "Landscape",
    "Line",
    "Problem",
    "RadiusCurve",
    "Result",
    "Sharpness",
    "Spectrum",
    "estimate",
    "interpolate",
    "landscape",
    "perturbation_curve",
    "sharpness",
    "spectrum",
    "top_eigs",
]
