"""Static figures of analysis results, in matplotlib.

Each function takes results by name (`{"SGD": result, ...}`; a bare result is a dict of one) and
gives a `Figure`; `save_figure` writes it as PNG and SVG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from steppe import theory
from steppe.analysis import Landscape, RadiusCurve, Robustness, Spectrum
from steppe.report.canvas import (
    COLOURS,
    SURFACE,
    error_bars,
    line_style,
    named,
    panels,
    plain_ticks,
    save_figure,
    shared_legend,
)
from steppe.report.survival import BACKWARDS, has_accuracy, survival_curves

__all__ = [
    "landscape_figure",
    "radius_figure",
    "robustness_figure",
    "save_figure",
    "spectrum_figure",
    "tradeoff_figure",
]

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def landscape_figure(results: Landscape | Mapping[str, Landscape]) -> Figure:
    """Loss over the plane with lines of equal loss, one panel a method, all on one colour scale.

    The scale is logarithmic where the loss spans more than a factor of 20. Points that are not
    finite are holes, hatched and counted in the panel's title.
    """
    by_name = named(results)
    figure, axes = panels(len(by_name))
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize

    surfaces = {name: np.ma.masked_invalid(r.loss.numpy()) for name, r in by_name.items()}
    if empty := [name for name, z in surfaces.items() if z.count() == 0]:
        raise ValueError(f"{empty[0]} has no finite point to show. Take a smaller span.")
    low, high = min(z.min() for z in surfaces.values()), max(z.max() for z in surfaces.values())
    scale = LogNorm if low > 0 and high > 20 * low else Normalize
    norm = scale(low, high if high > low else low + 1e-12)
    levels = norm.inverse(np.linspace(0, 1, 14)[1:-1])
    for axis, (name, result) in zip(axes, by_name.items(), strict=True):
        grid = (result.b.numpy(), result.a.numpy(), surfaces[name])
        axis.patch.set(hatch="////", edgecolor="grey", facecolor="none")
        smooth = "nearest" if result.holes else "gouraud"
        axis.pcolormesh(*grid, cmap=SURFACE, norm=norm, shading=smooth, rasterized=True)
        axis.contour(*grid, levels=levels, colors="white", linewidths=0.6)
        for colour, width in (("white", 3), ("black", 1)):
            axis.plot(0, 0, marker="+", color=colour, markersize=9, markeredgewidth=width)
        title = f"{name} ({result.holes} not finite)" if result.holes else name
        axis.set(aspect="equal", title=title, xlabel="along $d_2$", ylabel="along $d_1$")
    bar = figure.colorbar(ScalarMappable(norm, SURFACE), ax=axes, label="loss", shrink=0.85)
    if bar.ax.get_yscale() == "log":
        plain_ticks(bar.ax.yaxis)
    return figure


def spectrum_figure(results: Spectrum | Mapping[str, Spectrum]) -> Figure:
    """Density of the Hessian's eigenvalues, logarithmic, with each largest one marked.

    Panels share both axes: flatter is narrower.
    """
    by_name = named(results)
    figure, axes = panels(len(by_name), width=7.0, height=2.0, columns=1, share=True)
    peak = max(float(result.density.max()) for result in by_name.values())
    floor = 1e-7 * peak
    for i, (axis, (name, result)) in enumerate(zip(axes, by_name.items(), strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        axis.fill_between(result.grid, floor, result.density, color=colour, alpha=0.35)
        axis.plot(result.grid, result.density, color=colour, linewidth=1)
        axis.axvline(result.largest, color="black", linewidth=0.8, linestyle=":")
        words = rf"$\lambda_{{\max}}$ = {result.largest:.3g} "
        coordinates = ("data", "axes fraction")
        axis.annotate(words, (result.largest, 0.82), xycoords=coordinates, ha="right")
        axis.set(yscale="log", ylim=(floor, 3 * peak), ylabel="density")
        trace = f"trace {result.trace:.3g} ± {result.trace_error:.1g}"
        axis.set_title(f"{name}, {trace}, BN {result.origin['bn']}", fontsize="medium")
    axes[-1].set_xlabel("eigenvalue of the Hessian")
    return figure


def radius_figure(results: RadiusCurve | Mapping[str, RadiusCurve], *, rise: float = 0.1) -> Figure:
    """Expected loss against perturbation radius, with error bars and second-order theory.

    Stars on one level mark the radii of equal effect: where each kind raises the loss by `rise`.
    """
    by_name = named(results)
    figure, axes = panels(len(by_name), share=True)
    labels = {"random": "random", "sam": "adversarial, one step", "pgd": "adversarial, ascent"}
    for axis, (name, result) in zip(axes, by_name.items(), strict=True):
        top = float(result.loss[torch.isfinite(result.loss)].max())
        for i, kind in enumerate(result.kinds):
            errors = result.error[i].nan_to_num(0.0)
            error_bars(axis, i, result.radii, result.loss[i], errors, labels[kind])
            # Far out second order says nothing; cut it where it leaves the picture.
            second = result.theory[i].where(result.theory[i] <= 1.2 * top, math.nan)
            axis.plot(result.radii, second, color=COLOURS[i], linewidth=3, alpha=0.3)
        axis.axhline(result.base, color="grey", linewidth=0.8)
        level, reached = result.base + rise, result.radii_at(rise)
        reached = reached[reached.isfinite()]
        if len(reached):
            axis.axhline(level, color="black", linewidth=0.8, linestyle=":")
            stars = {"markersize": 9, "zorder": 3, "label": f"loss rise {rise:g}"}
            axis.plot(reached, torch.full_like(reached, level), "k*", **stars)
        title = f"{name}, batch {result.batch}, n = {result.origin['samples']}"
        axis.set(xscale="log", title=title, xlabel=r"perturbation radius $\|\epsilon\|$")
        if float(result.loss.nan_to_num(math.inf).min()) > 0 and top > 20 * result.base:
            axis.set_yscale("log")
    figure.supylabel("expected loss", fontsize="medium")
    if any(torch.isfinite(result.theory).any() for result in by_name.values()):
        axes[0].plot([], [], color="grey", linewidth=3, alpha=0.4, label="second order")
    axes[0].legend(frameon=False)
    return figure


def robustness_figure(results: Robustness | Mapping[str, Robustness]) -> Figure:
    """Accuracy (loss where there is none) against the size of each change, one panel a change.

    A line a name, dotted with BatchNorm recalibrated. Bars are the spread over draws of noise.
    """
    by_name = named(results)
    accuracy = has_accuracy(by_name.values())
    drawn = [survival_curves([result], accuracy) for result in by_name.values()]
    shown = list(dict.fromkeys(panel for of in drawn for curves in of.values() for panel in curves))
    if not shown:
        raise ValueError("There is nothing to draw: no change was measured.")
    figure, axes = panels(len(shown), columns=4, width=2.8)
    for axis, panel in zip(axes, shown, strict=True):
        for i, (name, of) in enumerate(zip(by_name, drawn, strict=True)):
            for style, (statistics, curves) in zip("-:", of.items(), strict=False):
                if panel in curves:
                    x, y, bars = zip(*curves[panel], strict=True)
                    words = filter(None, [name, statistics if len(of) > 1 else ""])
                    error_bars(axis, i, x, y, bars, ", ".join(words), linestyle=style)
        axis.set_title(panel, fontsize="medium")
        if panel.startswith(BACKWARDS):
            axis.invert_xaxis()
    figure.supylabel("accuracy %" if accuracy else "loss", fontsize="medium")
    if axes[0].get_legend_handles_labels()[1]:
        shared_legend(figure, axes)
    return figure


def tradeoff_figure(alpha: float = 1.0, beta: float = 10.0, d: int = 100) -> Figure:
    """Smoothness of the mixed loss against the noise floor over sigma, one curve a lam.

    Below and to the left of `lam = 1` (RWP) is the better trade.
    """
    figure, (axis,) = panels(1, width=5.0)
    sigmas = [alpha / beta * 4 ** (-1 + 2.5 * i / 119) for i in range(120)]
    for i, lam in enumerate((1.0, 0.9, 0.7, 0.5, 0.3)):
        floors = [theory.noise_floor(beta, sigma, d, lam) for sigma in sigmas]
        smooth = [theory.mixed_smoothness(alpha, beta, sigma, lam) for sigma in sigmas]
        name = r"$\lambda$ = 1 (RWP)" if lam == 1 else rf"$\lambda$ = {lam:g}"
        axis.plot(floors, smooth, **line_style(i), label=name)
    axis.axvspan(*(theory.noise_floor(beta, m * alpha / beta, d) for m in (1, 2)), alpha=0.12)
    floor = r"noise floor $2\beta^2\lambda^2\sigma^2 d$ (shaded: the lemma's range)"
    axis.set(xscale="log", xlabel=floor, ylabel="smoothness (lower is smoother)")
    axis.legend(frameon=False)
    return figure
