"""Every result draws itself; analyses of runs leave a picture beside their numbers."""

from typing import get_args

import pytest

from steppe.analysis import Result, ensemble, robustness, sharpness, top_eigs
from steppe.cli import run
from steppe.lab.runs import Store
from steppe.report import figure_of
from steppe.report.analyses import load, problem_of
from steppe.report.commands import Kind

pytest.importorskip("matplotlib")


def a_run(method):
    (found,) = [r for r in Store().runs() if r.name.startswith(f"digits-{method}-seed0")]
    return found


@pytest.fixture(scope="module")
def results(lab):
    """One result of each kind, of a real run."""
    (sgd,) = Store(lab / "runs").folder.glob("digits-sgd-seed0-*")
    found = next(run for run in Store(lab / "runs").runs() if run.folder == sgd)
    stored = [load(found, name).result for name in ("landscape", "spectrum", "radius")]
    problem = problem_of(found, samples=20)
    measured = [top_eigs(problem, k=2, tol=0.1), ensemble(problem, samples=2)]
    measured += [sharpness(problem, steps=1, m=10), robustness(problem, draws=1)]
    return {type(r): r for r in [*stored, *measured]}


def test_every_kind_of_result_plots_itself(results):
    for kind in Result.__subclasses__():
        if kind.plot is Result.plot:
            figure = results[kind].plot()
            assert figure.axes, kind
            figure.draw_without_rendering()


def test_an_ensembles_lines_are_all_named(results):
    one = next(r for kind, r in results.items() if kind.__name__ == "Ensemble")
    for figure, names in (
        (one.plot(), ["average of draws", "single model"]),
        (figure_of({"A": one, "B": one}), ["A", "B", "single model"]),
    ):
        (legend,) = figure.legends
        assert [entry.get_text() for entry in legend.get_texts()] == names


def test_kinds_are_not_mixed(results):
    first, second, *_ = results.values()
    with pytest.raises(TypeError, match="One figure shows one kind of result, got Landscape"):
        figure_of({"a": first, "b": second})


def test_an_analysis_leaves_a_picture_and_says_where(capsys, in_lab):
    sgd = a_run("sgd")
    picture = sgd.folder / "analysis" / "landscape.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    picture.unlink()
    again = ["analyze", "landscape", sgd.name, "--samples", "48", "--n", "7"]
    assert run(again) == 0
    said = capsys.readouterr().err
    assert f"numbers: {sgd.folder}/analysis/landscape.npz, picture: landscape.png" in said
    assert picture.exists()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_figure_of_named_runs(capsys, in_lab, kind):
    names = [a_run("sgd").name, a_run("m-rwp").name]
    assert run(["figure", kind, *names, "-o", f"drawn-{kind}"]) == 0
    assert (in_lab / f"drawn-{kind}.png").exists()
    svg = (in_lab / f"drawn-{kind}.svg").read_text()
    assert "<!-- SGD, seed 0" in svg
    assert "<!-- m-RWP (ratio 0.6), seed 0" in svg


def test_what_is_missing_is_named_with_its_command(capsys, in_lab):
    rwp = a_run("rwp")
    assert run(["figure", "landscape", "comparison.json"]) == 2
    said = capsys.readouterr().err
    assert f"no landscape is stored for {rwp.name}" in said
    assert f"steppe analyze landscape {rwp.name}" in said
    assert run(["figure", "landscape"]) == 2
    assert "say which runs: steppe figure landscape RUN" in capsys.readouterr().err
    assert run(["figure", "landscape", rwp.name, "--recipe", "digits"]) == 2
    assert "belong to figures 1 to 5" in capsys.readouterr().err
