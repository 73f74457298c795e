"""The outcome of an analysis in a few words."""

from __future__ import annotations

import math

from torch import Tensor

from steppe import analysis
from steppe.analysis import Result
from steppe.report.svg import shown_within


def described(result: Result) -> str:
    """The outcome in a few words."""
    match result:
        case analysis.Landscape():
            finite = result.loss[result.loss.isfinite()]
            top = float(finite.max()) if len(finite) else math.nan
            holes = f", {result.holes} not finite" if result.holes else ""
            return f"loss {result.centre:.4g} at the centre, up to {top:.4g}{holes}"
        case analysis.Spectrum():
            return (
                f"largest eigenvalue {shown_within(result.largest, result.largest_residual)}, "
                f"trace {result.trace:.4g} ± {result.trace_error:.1g}"
            )
        case analysis.RadiusCurve():
            last = ", ".join(
                f"{kind} {loss:.4g}"
                for kind, loss in zip(result.kinds, result.loss[:, -1].tolist(), strict=True)
            )
            return f"loss {result.base:.4g}; at radius {float(result.radii[-1]):g}: {last}"
        case analysis.Sharpness():
            return (
                f"{result.case} rise {result.value:.4g} ± {result.error:.1g} at rho {result.rho:g}"
            )
        case analysis.Robustness():
            return _survived(result)
        case analysis.Ensemble():
            (nll, right, ece), mean = result.single.tolist(), result.averaged[-1].tolist()
            return (
                f"NLL {nll:.4g} -> {mean[0]:.4g}, accuracy {100 * right:.4g} -> {100 * mean[1]:.4g}, ECE "
                f"{100 * ece:.3g} -> {100 * mean[2]:.3g} with {len(result.averaged)} draws"
            )
    return type(result).__name__


def _survived(result: analysis.Robustness) -> str:
    """Accuracy as it is and after the changes that tables show."""
    metric, scale = result.accuracy, 100.0
    said = "accuracy"
    if bool(metric.isnan().all()):
        metric, scale, said = result.loss, 1.0, "loss"
    parts = [f"{said} {_each(metric[:, 0], scale)}"]
    for change in (analysis.Rounding(4), analysis.Rounding(3), analysis.Pruning(0.8)):
        if (place := result.place(change)) is not None:
            name = result.labels[place].partition(",")[0]
            parts.append(f"{name} {_each(metric[:, place], scale)}")
    several = f" ({' / '.join(result.statistics)})" if len(result.statistics) > 1 else ""
    return ", ".join(parts) + several


def _each(values: Tensor, scale: float) -> str:
    return " / ".join(f"{scale * value:.4g}" for value in values.tolist())
