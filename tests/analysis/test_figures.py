"""The figures are looked at by people; these tests hold what a look can miss."""

import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from steppe.analysis import (
    Problem,
    Pruning,
    Rounding,
    TwoOfFour,
    landscape,
    perturbation_curve,
    robustness,
    spectrum,
)

from .known import quadratic, rotated, settled_net

pytest.importorskip("matplotlib")
from steppe.report import figures


@pytest.fixture(scope="module")
def problems():
    nets = {name: settled_net("conv", seed=seed) for name, seed in (("SGD", 0), ("RWP", 1))}
    return {name: Problem(model, F.cross_entropy, data) for name, (model, data) in nets.items()}


@pytest.fixture(scope="module")
def surfaces(problems):
    return {name: landscape(problem, n=5) for name, problem in problems.items()}


def written(figure, folder):
    paths = figures.save_figure(figure, folder / "figure")
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert paths[0].read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in paths[1].read_text()[:2000]
    return figure


def test_methods_share_one_colour_scale(surfaces, tmp_path):
    figure = written(figures.landscape_figure(surfaces), tmp_path)
    assert [axis.get_title() for axis in figure.axes[:2]] == ["SGD", "RWP"]
    low = min(result.loss.min().item() for result in surfaces.values())
    high = max(result.loss.max().item() for result in surfaces.values())
    for axis in figure.axes[:2]:
        assert axis.collections[0].get_clim() == pytest.approx((low, high))
    assert len(figure.axes) == 3  # two panels, one colour bar


def test_holes_are_left_empty_and_counted(surfaces, tmp_path):
    torn = surfaces["SGD"].loss.clone()
    torn[0, :3] = float("nan")
    torn[1, 0] = float("inf")
    result = replace(surfaces["SGD"], loss=torn)
    figure = written(figures.landscape_figure({"SGD": result}), tmp_path)
    assert figure.axes[0].get_title() == "SGD (4 not finite)"
    assert figure.axes[0].collections[0].get_array().mask.sum() == 4
    with pytest.raises(ValueError, match="no finite point to show"):
        figures.landscape_figure(replace(result, loss=torch.full((5, 5), float("nan"))))


def test_spectra_mark_the_largest_eigenvalue(problems, tmp_path):
    results = {name: spectrum(problem, steps=10) for name, problem in problems.items()}
    figure = written(figures.spectrum_figure(results), tmp_path)
    for axis, result in zip(figure.axes, results.values(), strict=True):
        assert f"{result.largest:.3g}" in axis.texts[0].get_text()
        assert axis.lines[-1].get_xdata()[0] == result.largest


def words_of(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_radius_curves_carry_error_bars_and_theory(problems, tmp_path):
    radii = [0.01, 0.1, 1.0]
    curves = {
        n: perturbation_curve(p, radii, batch=6, directions=2, steps=1) for n, p in problems.items()
    }
    figure = written(figures.radius_figure(curves), tmp_path)
    assert len(figure.axes[0].containers) == 3
    assert "second order" in words_of(figure.axes[0].get_legend())
    curve = curves["SGD"]
    bare = replace(curve, theory=torch.full_like(curve.theory, math.nan))
    legend = figures.radius_figure(bare).axes[0].get_legend()
    assert "second order" not in words_of(legend)
    plain = perturbation_curve(quadratic(rotated(torch.ones(4))), radii, ["random"])
    marked = written(figures.radius_figure(plain, rise=0.02), tmp_path).axes[0]
    (stars,) = (line for line in marked.lines if line.get_marker() == "*")
    assert stars.get_xdata().tolist() == plain.radii_at(0.02).tolist()
    assert "loss rise 0.02" in words_of(marked.get_legend())
    unreached = figures.radius_figure(plain, rise=1e6).axes[0]
    assert not [line for line in unreached.lines if line.get_marker() == "*"]


def test_the_trade_off_draws_every_lam(tmp_path):
    figure = written(figures.tradeoff_figure(), tmp_path)
    labels = words_of(figure.axes[0].get_legend())
    assert labels[0] == r"$\lambda$ = 1 (RWP)"
    assert labels[1:] == [rf"$\lambda$ = {lam}" for lam in (0.9, 0.7, 0.5, 0.3)]


def test_bad_input_is_named(surfaces, monkeypatch):
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.spectrum_figure({})
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pip install 'steppe\[report\]'"):
        figures.landscape_figure(surfaces)


def test_robustness_has_a_line_a_name(problems, tmp_path):
    changes = [Rounding(8), Rounding(2), Pruning(0.5), TwoOfFour()]
    sgd, rwp = (robustness(problem, changes) for problem in problems.values())
    figure = written(figures.robustness_figure({"SGD": sgd, "RWP": rwp}), tmp_path)
    bits, pruned, fours = figure.axes
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["bits, per filter", "share pruned, per tensor", "share pruned, 2:4"]
    assert bits.xaxis_inverted()
    first, second = pruned.containers
    assert first.get_label() == "SGD"
    (start, half), (_, end) = first[0].get_xydata(), second[0].get_xydata()
    assert (start[0], half[0]) == (0, 0.5)  # the unchanged model, and half pruned
    assert half[1] == pytest.approx(100 * sgd.accuracy[0, 3].item())
    assert end[1] == pytest.approx(100 * rwp.accuracy[0, 3].item())
    half = fours.containers[0][0].get_xydata()[1]
    assert half.tolist() == [0.5, pytest.approx(100 * sgd.accuracy[0, 4].item())]
