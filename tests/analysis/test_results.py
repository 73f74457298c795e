import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from steppe.analysis import (
    Landscape,
    Problem,
    Result,
    Spectrum,
    ensemble,
    estimate,
    landscape,
    perturbation_curve,
    robustness,
    sharpness,
    spectrum,
    top_eigs,
)

from .known import quadratic, rotated, settled_net

LONG = {
    "landscape": lambda p, **o: landscape(p, n=4, **o),
    "top_eigs": lambda p, **o: top_eigs(p, k=3, tol=1e-4, **o),
    "spectrum": lambda p, **o: spectrum(p, steps=8, probes=3, **o),
    "radius": lambda p, **o: perturbation_curve(p, [0.1, 0.2], batch=5, directions=3, steps=2, **o),
    "worst": lambda p, **o: sharpness(p, m=1, steps=1, **o),
    "robustness": lambda p, **o: robustness(p, draws=1, recalibrate=[p.data[0]], **o),
    "ensemble": lambda p, **o: ensemble(p, samples=7, **o),
    "average": lambda p, **o: sharpness(p, case="average", m=5, draws=9, **o),
}


def net_problem(**options):
    model, data = settled_net("conv")
    return Problem(model, F.cross_entropy, data, **options)


def same(a, b, *, but=()):
    for f in fields(a):
        v, w = getattr(a, f.name), getattr(b, f.name)
        if f.name in but:
            continue
        if isinstance(v, Tensor):
            torch.testing.assert_close(v, w, rtol=0, atol=0, equal_nan=True)
        else:
            assert v == w or (v != v and w != w)


@pytest.mark.parametrize("make", LONG.values(), ids=LONG)
def test_results_load_as_they_were_saved(make, tmp_path):
    result = make(net_problem())
    path = result.save(tmp_path / "deep" / "result.npz")
    again = Result.load(path)
    assert type(again) is type(result)
    same(result, again)
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert json.loads(text)["kind"] == type(result).__name__
    assert json.loads(text)["origin"]["bn"] == "eval"


def test_holes_become_none_in_json_and_stay_in_npz(tmp_path):
    result = landscape(net_problem(), n=2)
    torn = replace(result, loss=torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]]).double())
    assert torn.to_dict()["loss"] == [[1.0, None], [None, 2.0]]
    assert Landscape.load(torn.save(tmp_path / "a.npz")).holes == 2


def test_the_wrong_file_is_named(tmp_path):
    path = spectrum(quadratic(rotated(torch.ones(3)))).save(tmp_path / "s.npz")
    assert isinstance(Spectrum.load(path), Spectrum)
    with pytest.raises(ValueError, match="holds 'Spectrum', wanted Landscape"):
        Landscape.load(path)
    (tmp_path / "notes.npz").write_text("no archive")
    with pytest.raises(
        ValueError, match=r"notes\.npz was not written by steppe\.analysis: it is no"
    ):
        Result.load(tmp_path / "notes.npz")


def test_the_estimate_counts_what_torch_counts():
    model = torch.nn.Linear(10, 4, bias=False)
    problem = Problem(model, F.cross_entropy, (torch.randn(6, 10), torch.zeros(6).long()))
    assert estimate(problem, forwards=5).flops == 5 * 2 * 6 * 10 * 4
    assert estimate(problem, gradients=1).flops == 2 * 2 * 6 * 10 * 4
    assert estimate(problem, forwards=5).seconds > 0
    assert "FLOP, about" in str(estimate(problem, products=1000))


def test_progress_says_the_cost_first_and_then_how_far(capsys):
    landscape(net_problem(), n=3, progress=True)
    text = capsys.readouterr().err
    assert text.startswith("landscape: 9 forwards, ")
    assert "FLOP, about" in text.splitlines()[0]
    assert "100%" in text
    landscape(net_problem(), n=3)
    assert capsys.readouterr().err == ""


def test_importing_steppe_does_not_import_the_analyses():
    code = (
        "import sys, steppe; assert 'steppe.analysis' not in sys.modules; "
        "import steppe.analysis; assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
