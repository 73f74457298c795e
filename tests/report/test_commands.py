"""`steppe analyze`, `figure` and `report` on real runs."""

import json
import re
import shutil
import sys
import warnings

import pytest
import torch

from steppe.analysis import Landscape, Result
from steppe.cli import run
from steppe.lab.runs import Run, Store
from steppe.report.analyses import problem_of


def says(capsys, *arguments, code=0):
    found = run(list(arguments))
    said = capsys.readouterr()
    assert found == code, said.err
    return said.err


def a_run(method="sgd"):
    (found,) = [r for r in Store().runs() if r.name.startswith(f"digits-{method}-seed0")]
    return found


def test_an_analysis_is_kept_with_what_was_asked_and_reused(capsys, in_lab):
    found = a_run()
    result = Result.load(found.folder / "analysis" / "landscape.npz")
    assert isinstance(result, Landscape)
    about = json.loads((found.folder / "analysis" / "landscape.json").read_text())
    assert (about["request"]["n"], about["request"]["samples"]) == (7, 48)
    assert about["environment"]["torch"] == torch.__version__
    again = ["analyze", "landscape", found.name, "--samples", "48", "--n", "7"]
    assert "1 of 1 are stored already" in says(capsys, *again)
    assert not list((found.folder / "analysis").glob(".*"))


def test_other_settings_are_done_anew_after_an_estimate(capsys, in_lab, monkeypatch):
    found = a_run("rwp")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    said = says(capsys, "analyze", "landscape", found.name, "--samples", "20", "--n", "3")
    lines = said.splitlines()
    assert re.match(r"landscape: 9 forwards, .*FLOP, about ", lines[0])
    assert [line for line in lines[1:] if line.startswith("[1/1]")]
    said = says(capsys, "analyze", "landscape", found.name, "--samples", "20", "--n", "5")
    assert "stored already" not in said
    assert Result.load(found.folder / "analysis" / "landscape.npz").loss.shape == (5, 5)
    shutil.rmtree(found.folder / "analysis")


def test_a_comparison_names_one_run_of_each_method(capsys, in_lab):
    said = says(
        capsys, "analyze", "sharpness", "comparison.json", "--samples", "30", "--case", "average",
        "--draws", "2",
    )  # fmt: skip
    assert "[4/4]" in said
    for method in ("sgd", "sam", "rwp", "m-rwp"):
        file = a_run(method).folder / "analysis" / "sharpness-average.npz"
        assert Result.load(file).case == "average"
        file.unlink()
        file.with_suffix(".json").unlink()


def test_robustness_is_measured_on_test_data_beside_training_batches(capsys, in_lab):
    stored = Result.load(a_run("sam").folder / "analysis" / "robustness.npz")
    test = problem_of(a_run("sam"), samples=48, split="test")
    assert stored.origin["data_hash"] == test.describe()["data_hash"]
    assert stored.statistics == ("as is",)  # the net has no BatchNorm
    said = says(capsys, "analyze", "robustness", a_run("sam").name, "--samples", "30")
    assert re.search(r"accuracy [\d.]+, 4 bits [\d.]+, 3 bits [\d.]+, 80 % pruned", said)
    with warnings.catch_warnings():  # nobody asked for recalibration where there is nothing to do
        warnings.filterwarnings("error", "recalibrate= does nothing")
        says(capsys, "analyze", "robustness", a_run("sam").name, "--samples", "30", "--bn", "batch")
    says(capsys, "analyze", "robustness", a_run("sam").name, "--samples", "48", "--draws", "2")
    wrong = ["analyze", "robustness", a_run("sam").name, "--bn", "recalibrate"]
    assert "are not those of training" in says(capsys, *wrong, code=2)


def test_an_ensemble_is_measured_on_test_data(capsys, in_lab):
    stored = Result.load(a_run("sam").folder / "analysis" / "ensemble.npz")
    test = problem_of(a_run("sam"), samples=48, split="test")
    assert stored.origin["data_hash"] == test.describe()["data_hash"]
    asked = ["analyze", "ensemble", a_run("sam").name, "--samples", "48", "--draws", "3"]
    said = says(capsys, *asked, "--ratio", ".2")
    assert re.search(r"NLL [\d.]+ -> [\d.]+, accuracy .* with 3 draws", said)
    assert (Result.load(a_run("sam").folder / "analysis" / "ensemble.npz")).ratio == 0.2


def test_the_problem_is_the_trained_model_on_fixed_samples(in_lab):
    found = a_run()
    whole = problem_of(found, samples=10_000)
    assert whole.samples == 60
    trained = found.result["metrics"]["train"]["nll"]
    assert whole.value() == pytest.approx(trained, rel=1e-5)
    first, second = (problem_of(found, samples=20) for _ in range(2))
    assert torch.equal(first.data[0], second.data[0])
    assert first.describe() == second.describe()
    assert problem_of(found, samples=50, split="test").samples == 50


@pytest.mark.slow
def test_figures_are_written_in_both_forms(capsys, in_lab, tmp_path):
    out = str(tmp_path / "f")
    says(capsys, "figure", "2", "comparison.json", "-o", out)
    says(capsys, "figure", "1", "digits-sgd-seed0-*", "digits-sam-seed0-*", "-o", f"{out}1")
    says(capsys, "figure", "5", "digits-sgd-seed0-*", "digits-m-rwp-seed0-*", "-o", f"{out}5")
    says(capsys, "figure", "theory", "-o", f"{out}t")
    for name in ("f", "f1", "f5-landscape", "f5-spectrum", "ft"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()[:2000]


def test_trade_off_and_sensitivity_come_from_sweeps(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ["--set", "steps=4", "--set", "train_size=40", "--jobs", "1", "-q"]
    for method in ("rwp", "m-rwp"):
        sweep = ["sweep", "digits", "--method", method, "--over", "ratio=.3,.6", *quick]
        says(capsys, *sweep, "--out", f"{method}.json")
    says(capsys, "sweep", "digits", "--method", "rwp", "--over", "sigma=.01", *quick)
    shown = says(capsys, "figure", "3", "rwp.json", "m-rwp.json", "digits-rwp-*")
    assert "figure 3 goes by ratio; experiments left out: 1 by sigma" in shown
    assert "lacks two or more strengths of m-rwp" in says(capsys, "figure", "3", "rwp.json", code=2)
    grid = ["--over", "eta=.1,1", "--over", "beta=.9,.99"]
    says(capsys, "sweep", "digits", "--method", "arwp", *grid, *quick)
    says(capsys, "figure", "4", "digits-arwp-*")
    svg = (tmp_path / "figure-4.svg").read_text()
    assert (tmp_path / "figure-3.svg").exists()
    assert "<svg" in svg


def test_figures_of_a_recipe_find_their_runs(capsys, tmp_path, monkeypatch):
    """The store is searched by the recipe; changed settings do not count."""
    from steppe.lab import train
    from steppe.lab.recipes import RECIPES

    monkeypatch.chdir(tmp_path)
    tiny = lambda method: RECIPES["digits"](method).replace(steps=3, train_size=40)  # noqa: E731
    monkeypatch.setitem(RECIPES, "tiny", tiny)
    arguments = ["figure", "2", "--recipe", "tiny", "--methods", "rwp", "m-rwp"]
    said = says(capsys, *arguments, code=2)
    assert "lacks runs of rwp, m-rwp" in said
    assert "steppe compare rwp m-rwp --recipe tiny --track-train" in said
    train(tiny("rwp").replace(recipe="tiny", eval_every=1), progress=False)
    train(tiny("m-rwp").replace(lr=0.01), progress=False)
    assert "lacks runs of m-rwp (" in says(capsys, *arguments, code=2)
    train(tiny("m-rwp").replace(eval_every=1), progress=False)
    assert "figure-2.svg" in says(capsys, *arguments)


MISTAKES = [
    (
        ["analyze", "landscape", "digits-sgd-seed9"],
        "there is no run 'digits-sgd-seed9' in runs. Did",
    ),
    (["analyze", "landscape"], "say which runs"),
    (["analyze", "landscape", "digits-s"], "give more of the name"),
    (["analyze", "landscape", "comparison.json", "--seeds", "0"], "seeds must be at least 1"),
    (["analyze", "landscape", "no.json"], "cannot read no.json: No such file"),
    (["analyze", "landscape", "digits-sgd-seed0", "--n", "1"], "n must be at least 2"),
    (["analyze", "landscape", "digits-sgd-seed0", "--samples", "0"], "samples must be at least 1"),
    (["analyze", "sharpness", "digits-sgd-seed0", "--rho", "-1"], "rho must be finite"),
    (["figure", "1"], "lacks runs of sgd (runs, recipe cifar10-resnet18). This makes it: steppe"),
    (["figure", "2"], "steppe compare rwp:sigma=0.01 m-rwp:lam=0.5,sigma=0.01 --recipe cifar100"),
    (["figure", "3"], "steppe sweep cifar100-resnet18 --method m-rwp --search sigma"),
    (["figure", "4"], "steppe sweep cifar10-resnet18 --method arwp --search eta-beta"),
    (["figure", "2", "--recipe", "digitz"], "Did you mean digits"),
    (["figure", "5", "digits-rwp-seed0-*"], "steppe analyze landscape digits-rwp-seed0"),
    (["report"], "say what to show"),
    (["report", "comparison.json", "-o", "page.pdf"], "the name must end in .html"),
    (["report", "nothing-*"], "there is no run 'nothing-*'"),
]


@pytest.mark.parametrize(
    ("arguments", "said"), MISTAKES, ids=lambda v: v if isinstance(v, str) else " ".join(v)
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, in_lab, arguments, said):
    err = says(capsys, *arguments, code=2)
    (line,) = [line for line in err.splitlines() if line.startswith("steppe: ")]
    assert said in line
    assert "Traceback" not in err


def test_runs_that_cannot_be_analysed_say_why(capsys, in_lab):
    kept = a_run()
    for name, content, said in (
        ("odd-unfinished", None, "is not finished: steppe train --resume"),
        ("odd-diverged", {"status": "diverged"}, "diverged, so there is no trained model"),
    ):
        copy = Run(kept.folder.parent / name)
        copy.folder.mkdir()
        shutil.copy(kept.folder / "config.json", copy.folder)
        if content:
            copy.write_json("result.json", content)
        assert said in says(capsys, "analyze", "spectrum", name, code=2)
        shutil.rmtree(copy.folder)
